"""TRL's SFT packed: whatever TRL makes of the data, and whichever loss it takes, the numbers are those it has unpacked."""

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig

from tests.support import trl_cases
from tests.support.small_runs import logged, losses, on_ranks, quiet
from tests.support.trl_cases import make_sft, model, numbers, outcome, text, tokenizer
from tests.support.trl_preferences import case
from ullage import InputError
from ullage.training import RaggedTrainerMixin

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]  # what TRL will take away

NUMBER = 12
#: As long as the longest chat.
PACKED = {"packing_capacity": 26, "packing_plan_strategy": "next_fit"}
#: A chat in which what the assistant says is marked, its end included.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}w1 {% generation %}{{ message['content'] }} "
    "</s> {% endgeneration %}{% else %}w2 {{ message['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w1 {% endif %}"
)


def rows(make):
    return Dataset.from_list([make(i) for i in range(NUMBER)])


def turns(i, *roles):
    return [{"role": role, "content": text(i + k, 1 + (i + k) % 4)} for k, role in enumerate(roles)]


def tokenized(i):
    ids = [3 + (i * 5 + k) % 40 for k in range(1 + i * 3 % 17)]
    return {"input_ids": ids, "labels": [token if k % 3 else -100 for k, token in enumerate(ids)]}


def streamed(make):
    return IterableDataset.from_generator(lambda: (make(i) for i in range(NUMBER)))


UNPREPARED = {"dataset_kwargs": {"skip_prepare_dataset": True}}
SMOOTHED = {"label_smoothing_factor": 0.2}


def plain(i):
    return {"text": text(i, 1 + i * 5 % 16)}


def parted(i):
    return {"prompt": text(i, 1 + i % 4), "completion": " " + text(i + 1, 1 + i * 3 % 9)}


def talk(i):
    return {"messages": turns(i, *["user", "assistant"] * (1 + i % 3))}


def answered(i):
    return {"prompt": turns(i, "user"), "completion": turns(i + 1, "assistant")}


def weighed(outputs, labels, num_items_in_batch=None):
    """A loss of one's own: half the sum over the labels that count."""
    losses = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100
    )
    return losses / 2 / ((labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch)


CASES = {
    "text": (lambda: rows(plain), {}, {}),
    "text, truncated": (lambda: rows(plain), {"max_length": 5}, {}),
    "prompt and completion": (lambda: rows(parted), {}, {}),
    "prompt and completion, loss on both": (lambda: rows(parted), {"completion_only_loss": False}, {}),
    "chats": (lambda: rows(talk), {}, {}),
    "chats, loss on the assistant": (lambda: rows(talk), {"assistant_only_loss": True}, {}),
    "prompts and answers": (lambda: rows(answered), {"assistant_only_loss": True}, {}),
    "tokenized": (lambda: rows(tokenized), {"max_length": None}, {}),
    "tokenized, not prepared": (lambda: rows(tokenized), UNPREPARED, {}),
    "ids alone, not prepared": (lambda: rows(tokenized).remove_columns("labels"), UNPREPARED, {}),
    "streamed": (lambda: streamed(parted), {}, {}),
    "streamed chats": (lambda: streamed(talk), {"assistant_only_loss": True}, {}),
    "dft": (lambda: rows(parted), {"loss_type": "dft"}, {}),
    "chunked": (lambda: rows(parted), {"loss_type": "chunked_nll"}, {}),
    "smoothed": (lambda: rows(parted), SMOOTHED, {}),
    "a loss of one's own": (lambda: rows(parted), {}, {"compute_loss_func": weighed}),
    "formatted": (lambda: rows(lambda i: {"words": text(i, 1 + i)}), {}, {"formatting_func": lambda row: row["words"]}),
    "padding-free": (lambda: rows(tokenized), {"padding_free": True, "max_length": None}, {}),
}
#: A capacity says all that they say; TRL alone would ask for flash attention, or train on what is not truncated.
OF_PACKING = ("padding_free",)


def train(data, options, more, folder, **packing):
    more = {"processing_class": trl_cases.tokenizer(), **more}
    more["processing_class"].chat_template = TEMPLATE
    trainer = make_sft("llama", folder, data=data, mixed=bool(packing), more=more, **options, **packing)
    return *outcome(trainer), trainer


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_losses_and_metrics_are_those_of_trl_unpacked(name, tmp_path):
    make, options, more = CASES[name]
    theirs = {key: value for key, value in options.items() if key not in OF_PACKING}
    expected, expected_evaluation, _ = train(make(), theirs, more, tmp_path)
    found, evaluation, trainer = train(make(), options, more, tmp_path, **PACKED)
    assert len(found) == len(expected) == 3
    assert trainer._packer.options is not None
    assert_alike([*found, evaluation], [*expected, expected_evaluation], 2e-6)
    assert len({entry["loss"] for entry in expected}) == 3


@pytest.mark.parametrize("name", ["falcon_h1", "gemma2"])
def test_models_that_run_by_lengths_train_as_trl_trains_each_sequence_alone(name, tmp_path):
    """The mixers of a hybrid, soft caps and windows: TRL's fused head calls what packing has put in.

    TRL takes one sequence per call, because Gemma 2 gives nan on padded rows in float64.
    """
    alone = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    expected, _ = outcome(make_sft(name, tmp_path, mixed=False, **alone))
    found = trl_cases.run(name, tmp_path, **{**PACKED, "packing_capacity": 16})
    assert all(len(step) > 1 and max(step) > 1 for step in found["sequences"])
    for key in ("loss", "grad_norm", "num_tokens"):
        assert [entry[key] for entry in found["logged"]] == pytest.approx([entry[key] for entry in expected], rel=2e-6)


ADAPTERS = {"lora": True, "activation_checkpointing": True}
REENTRANT = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}
#: How the model is wrapped.
WRAPPED = {
    "checkpointed, reentrant": {**REENTRANT, "stage": 0},
    "adapters, checkpointed": {**ADAPTERS, "stage": 0},
    "zero 2": {"stage": 2},
    "zero 3, adapters, checkpointed": {**ADAPTERS, "stage": 3},
}


def assert_alike(found, expected, rel):
    for mine, one in zip(found, expected, strict=True):
        assert {key: mine[key] for key in one} == pytest.approx(one, rel=rel, abs=1e-9)


@pytest.fixture(scope="module")
def unwrapped(tmp_path_factory):
    """What TRL's own trainer logs on one process, and evaluates last, with and without adapters."""
    folder, found = tmp_path_factory.mktemp("trl"), {}
    for lora in (False, True):
        steps, evaluated = outcome(make_sft("llama", folder, mixed=False, lora=lora))
        found[lora] = [*steps, evaluated]
    return found


@pytest.mark.distributed
def test_two_processes_train_a_wrapped_model_as_trl_on_one(unwrapped, tmp_path):
    packed = {**PACKED, "packing_capacity": 16}
    cases = {name: ["llama", {**options, **packed}] for name, options in WRAPPED.items()}
    for results in on_ranks(2, trl_cases, tmp_path, cases, timeout=300):
        for name, found in results.items():
            rel = 1e-5 if WRAPPED[name]["stage"] else 2e-6  # float32 under ZeRO
            expected = unwrapped[WRAPPED[name].get("lora", False)]
            assert_alike([*found["logged"], found["evaluated"]], expected, rel)


def ready(folder, data=None, model=None, **options):
    from ullage.training.trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(str(folder), report_to=[], disable_tqdm=True, **options)
    more = {"train_dataset": rows(plain) if data is None else data, "processing_class": trl_cases.tokenizer()}
    return SFTTrainer(trl_cases.model() if model is None else model, arguments, **more)


def test_the_ready_configuration_has_trls_defaults_and_works_without_an_accelerator(tmp_path):
    import dataclasses

    import trl

    from ullage.training import trl as ours

    for name in ("SFT", "DPO", "KTO", "Reward", "GRPO"):
        config, theirs = getattr(ours, f"{name}Config"), getattr(trl, f"{name}Config")
        mine, one = config(str(tmp_path)), theirs(str(tmp_path), use_cpu=not torch.accelerator.is_available())
        names = [field.name for field in dataclasses.fields(one)]
        assert {field: getattr(mine, field) for field in names} == {field: getattr(one, field) for field in names}
        assert mine.packing_capacity is None
        assert issubclass(getattr(ours, f"{name}Trainer"), getattr(trl, f"{name}Trainer"))


def test_the_ready_trainer_trains_packed_by_trls_defaults_and_resumes(tmp_path):
    """bf16 and gradient checkpointing, which are on."""
    trainer = ready(tmp_path, packing_capacity=26, max_steps=2, save_steps=1, logging_steps=1)
    assert trainer.args.bf16
    assert trainer.args.activation_checkpointing
    trainer.train()
    assert (tmp_path / "checkpoint-1" / "manifest.json").exists()
    again = ready(tmp_path, packing_capacity=26, max_steps=2, save_strategy="no", logging_steps=1)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert losses(again) == losses(trainer)
    assert all(entropy > 3 for (entropy,) in logged(again, "entropy"))


@pytest.mark.parametrize("name", ["packing", "eval_packing"])
def test_trls_packing_beside_ours_is_refused_before_data_are_prepared(name, tmp_path):
    data = Dataset.from_list([{"text": "w1"}])
    data.map = None  # preparing calls it
    with pytest.raises(InputError, match=rf"{name}=True lets TRL join .* Leave {name} out"):
        ready(tmp_path, data, packing_capacity=16, **{name: True})


def test_masks_without_labels_are_refused_in_evaluation_too(tmp_path):
    ids = rows(tokenized).remove_columns("labels")
    masked = ids.map(lambda row: {"completion_mask": [1] * len(row["input_ids"])})
    trainer = ready(tmp_path, ids, packing_capacity=26, **UNPREPARED)
    with pytest.raises(ValueError, match="mask columns but no 'labels'"):
        trainer.evaluate(masked)


def test_a_fresh_dataset_is_prepared_for_evaluation(tmp_path):
    results = []
    for packing in ({}, PACKED):
        more = {"processing_class": trl_cases.tokenizer()}
        trainer = make_sft("llama", tmp_path, mixed=bool(packing), more=more, **packing)
        results.append(trl_cases.numbers(trainer.evaluate(rows(parted))))
    assert {name: results[1][name] for name in results[0]} == pytest.approx(results[0], rel=2e-6)


# Unpacked: what TRL's trainers do by themselves stays theirs, to the digit.
def mixed(trainer):
    return type(f"Ragged{trainer.__name__}", (RaggedTrainerMixin, trainer), {})


def build(kind, config, data, more, folder, **options):
    torch.manual_seed(0)
    options = {
        "max_steps": 3, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "learning_rate": 1e-2,
        "bf16": False, "activation_checkpointing": False, **options,
    }  # fmt: skip
    arguments = quiet(folder, config, **options)
    return kind(args=arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer(), **more)


@pytest.mark.parametrize("name", ["DPO", "Reward", "KTO", "GRPO"])
def test_training_and_evaluation_are_the_trainers_own_to_the_digit(name, tmp_path):
    results = []
    for wrap in (lambda kind: kind, mixed):
        kind, *rest = case(name, 10)
        options = {"num_generations": 2, "max_completion_length": 4} if name == "GRPO" else {}
        results.append(outcome(build(wrap(kind), *rest, tmp_path, **options)))
    assert len(results[0][0]) == 3
    assert "eval_loss" in results[0][1]
    assert results[1] == results[0]


def test_a_trainers_own_columns_are_kept_beside_adapters(tmp_path):
    """Rows that were packed beforehand say so in ``seq_lengths``; without it their sequences see each other."""
    import trl

    data = Dataset.from_list(
        [{"input_ids": [5, 6, 7, 8, 9, 10], "labels": [5, 6, 7, 8, 9, 10], "seq_lengths": [2, 4]}] * 4
    )
    options = {
        "padding_free": True,
        "packing": False,
        "max_length": None,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    bounds = []
    for wrap in (lambda kind: kind, mixed):
        flash = model()
        flash.config._attn_implementation = "flash_attention_2"  # TRL asks for its name, and runs nothing here
        more = {"model": flash, "peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
        trainer = build(wrap(trl.SFTTrainer), trl.SFTConfig, data, more, tmp_path, **options)
        bounds.append(next(iter(trainer.get_train_dataloader()))["cu_seq_lens_q"].tolist())
    assert bounds[0] == bounds[1] == [0, 2, 6, 8, 12]


def test_metrics_of_a_trainer_without_labels_are_computed(tmp_path):
    kind, config, data, more = case("Reward", 10)
    more = {**more, "compute_metrics": lambda found: {"rows": len(found.predictions), "labels": len(found.label_ids)}}
    metrics = [build(wrap(kind), config, data, more, tmp_path).evaluate() for wrap in (lambda each: each, mixed)]
    assert metrics[0]["eval_rows"] > 10
    assert [numbers(each) for each in metrics[:1]] == [numbers(each) for each in metrics[1:]]
