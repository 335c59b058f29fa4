"""SFT on chats with LoRA, packed: TRL's trainer with one import changed and a capacity added.

    python examples/11_sft_chats.py
    torchrun --nproc_per_node 2 examples/11_sft_chats.py --batch 8

The chats are made of docstrings of the standard library: the user gives a first line, the assistant goes on. TRL
applies the chat template and masks what the user says; each step is then planned and packed without padding. Loss,
accuracy and entropy are those of the assistant's tokens, as TRL logs them unpacked.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings

import datasets
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, set_seed

from ullage.datasets import docstrings
from ullage.training.trl import SFTConfig, SFTTrainer

SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>")
#: What the assistant says, its end included, is marked as generated: the loss is over these tokens alone.
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<end>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<end>{% endif %}{% endfor %}"
)


def make_chats(number: int) -> list[dict[str, list[dict[str, str]]]]:
    """Chats of one or more turns: a line of a docstring from the user, the next paragraph from the assistant."""
    chats = []
    for text in docstrings():
        paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
        turns = [
            {"role": role, "content": content}
            for asked, said in zip(paragraphs[::2], paragraphs[1::2], strict=False)
            for role, content in (("user", asked), ("assistant", said))
        ]
        if turns:
            chats.append({"messages": turns[:6]})
        if len(chats) == number:
            break
    return chats


def make_tokenizer(chats: list[dict[str, list[dict[str, str]]]], size: int) -> PreTrainedTokenizerFast:
    """Byte pairs of the chats, with a chat template."""
    own = Tokenizer(models.BPE())
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    own.train_from_iterator((turn["content"] for chat in chats for turn in chat["messages"]), trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=own, pad_token=SPECIAL[0], eos_token=SPECIAL[1])
    made.chat_template = TEMPLATE
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=240)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16, help="chats per step and process")
    parser.add_argument("--capacity", type=int, default=512, help="tokens of a microbatch")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    datasets.disable_progress_bars()
    set_seed(0)

    chats = make_chats(arguments.chats)
    tokenizer = make_tokenizer(chats, 1024)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=1024, **sizes, **special))

    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model,
            SFTConfig(
                folder,
                packing_capacity=arguments.capacity,  # this packs; everything else is TRL's
                assistant_only_loss=True,
                max_length=arguments.capacity,
                max_steps=arguments.steps,
                per_device_train_batch_size=arguments.batch,
                learning_rate=1e-2,
                logging_steps=max(1, arguments.steps // 5),
                bf16=torch.cuda.is_available(),
                activation_checkpointing=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=datasets.Dataset.from_list(chats),
            processing_class=tokenizer,
            # A model that knows nothing has to learn its words too; one that was trained before needs adapters alone.
            peft_config=LoraConfig(r=8, target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"]),
        )
        trainer.remove_callback(PrinterCallback)
        closing = trainer.train().metrics

    if trainer.is_world_process_zero():
        names = {"loss": "loss", "mean_token_accuracy": "accuracy", "entropy": "entropy", "num_tokens": "tokens"}
        print("step " + "".join(f"{title:>10}" for title in names.values()))
        for entry in (each for each in trainer.state.log_history if "loss" in each):
            figures = [f"{entry[name]:10.0f}" if name == "num_tokens" else f"{entry[name]:10.3f}" for name in names]
            print(f"{entry['step']:4d} " + "".join(figures))
        print(f"padding avoided: {closing['padding_avoided']:.0%} of what padded batches would compute")


if __name__ == "__main__":
    main()
