"""Our Trainer on the workers of Ray Train: where a worker is lost, the run goes on from its checkpoint.

    python examples/15_ray_train.py
    python examples/15_ray_train.py --lose_worker_at 7

Ray starts the workers, notices that one is gone and starts them again; where the checkpoints lie is Ray's to know. On a
cluster ``--storage`` is a folder that every node sees, and ``RAY_ADDRESS`` says where the cluster is. Where
it says nothing, Ray is started on this machine.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import ray.train
from ray.train.torch import TorchTrainer
from transformers import TrainerCallback


class Report(TrainerCallback):
    """Hand each checkpoint to Ray, and end a worker where the example is asked to."""

    def __init__(self, lose_worker_at):
        self.lose_worker_at, self.began_at = lose_worker_at, 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.began_at = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        context = ray.train.get_context()
        is_first_try = ray.train.get_checkpoint() is None
        if state.global_step == self.lose_worker_at and is_first_try and context.get_world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # as the machine under it would go: without a word

    def on_save(self, args, state, control, **kwargs):
        # Every worker reports; the files come from one, since all have written into one folder.
        context, folder = ray.train.get_context(), Path(args.output_dir) / f"checkpoint-{state.global_step}"
        checkpoint = ray.train.Checkpoint.from_directory(folder) if context.get_world_rank() == 0 else None
        losses = {row["step"]: row["loss"] for row in state.log_history if "loss" in row}
        told = {"losses": losses, "workers": context.get_world_size(), "began_at": self.began_at}
        ray.train.report(told, checkpoint=checkpoint)  # Ray keeps the figures that come with a checkpoint


def train_on_a_worker(chosen):
    """What each worker runs, at the start and after every loss."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    from ullage.datasets import byte_tokenizer, docstrings, tokenize
    from ullage.training import RaggedCollator, Trainer, TrainingArguments

    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=384, attn_implementation="ullage", **sizes))
    arguments = TrainingArguments(
        chosen["folder"],
        packing_capacity=1024,
        packing_global_batch_size=16,  # of all workers, however many there are
        max_steps=chosen["steps"],
        save_steps=chosen["save_steps"],
        logging_steps=1,
        learning_rate=3e-3,
        use_cpu=not chosen["use_gpu"],
        report_to=[],
        disable_tqdm=True,
    )
    samples = tokenize(docstrings()[:600], byte_tokenizer(), max_length=256)
    trainer = Trainer(model, arguments, RaggedCollator(), samples, callbacks=[Report(chosen["lose_worker_at"])])
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        trainer.train()
    else:
        with checkpoint.as_directory() as folder:
            trainer.train(resume_from_checkpoint=folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 2), help="the fewest and the most")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save_steps", type=int, default=3)
    parser.add_argument("--lose_worker_at", type=int, default=0, help="step after which a worker is killed, once")
    parser.add_argument("--use_gpu", action="store_true")
    parser.add_argument("--storage", default=None, help="where Ray keeps checkpoints; by default a temporary folder")
    chosen = parser.parse_args()
    if not ray.is_initialized():
        own = {"address": "local", "num_cpus": max(chosen.workers), "include_dashboard": False}
        ray.init(log_to_driver=False, **({} if "RAY_ADDRESS" in os.environ else own))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            storage = os.path.abspath(chosen.storage or os.path.join(scratch, "storage"))
            trainer = TorchTrainer(
                train_on_a_worker,
                train_loop_config={**vars(chosen), "folder": os.path.join(storage, "run")},
                scaling_config=ray.train.ScalingConfig(num_workers=tuple(chosen.workers), use_gpu=chosen.use_gpu),
                run_config=ray.train.RunConfig(
                    name="ullage",
                    storage_path=storage,
                    # How often workers may be lost; a node that is announced to go is counted apart.
                    failure_config=ray.train.FailureConfig(max_failures=3),
                    checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
                ),
            )
            result = trainer.fit()
    finally:
        ray.shutdown()
    for step, loss in sorted(result.metrics["losses"].items()):
        print(f"step {step}: loss {loss:.6f}")
    if result.metrics["began_at"]:
        print(f"went on from step {result.metrics['began_at']}")
    print(f"ended on {result.metrics['workers']} workers")


if __name__ == "__main__":
    main()
