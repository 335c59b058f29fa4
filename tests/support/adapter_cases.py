"""What the ranks of the adapter test run: an adapter trained packed and plain, and continued."""

import torch
from peft import LoraConfig, get_peft_model

from tests.support.fsdp_cases import as_torchrun
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.models.adapters import lora_targets
from ullage.training import RaggedCollator, Trainer, TrainingArguments

LENGTHS = (3, 17, 1, 9, 2, 5, 30, 4, 11, 6, 1, 8, 20, 2, 13, 7)


def run(folder, batch_size, packing, resume=None):
    torch.manual_seed(0)
    model = RecurrentForCausalLM(RecurrentConfig(cell="lstm", vocab_size=16, hidden_size=12, num_hidden_layers=2))
    model = get_peft_model(model, LoraConfig(r=3, **lora_targets(model)))
    generator = torch.Generator().manual_seed(1)
    samples = [{"input_ids": torch.randint(0, 4, (n,), generator=generator).tolist()} for n in LENGTHS]
    options = {"packing_capacity": 40} if packing else {}
    arguments = TrainingArguments(
        folder, max_steps=4, save_steps=2, per_device_train_batch_size=batch_size, learning_rate=0.05, logging_steps=1,
        report_to=[], use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    collator = RaggedCollator(labels_from="input_ids")
    trainer = Trainer(model, arguments, data_collator=collator, train_dataset=samples, eval_dataset=samples)
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    adapter = {name: p.tolist() for name, p in model.named_parameters() if p.requires_grad}
    return {"losses": losses, "adapter": adapter, "eval_loss": trainer.evaluate()["eval_loss"]}


def everything(rank, world, folder):
    as_torchrun(rank, world)
    results = {}
    for packing in (False, True):
        name = "packed" if packing else "plain"
        results[name] = run(f"{folder}/{name}", 8 // world, packing)
        results[f"{name} again"] = run(f"{folder}/{name} again", 8 // world, packing, f"{folder}/{name}/checkpoint-2")
    return results
