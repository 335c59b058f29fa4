"""Search hyperparameters of a recurrent language model on the docstrings of Python's standard library.

    python examples/08_hyperparameter_search.py

Optuna tries five models through ``Trainer.hyperparameter_search``: cell, width and learning rate. Each is judged by
how often it guesses the next byte, over sequences of true length: no padding reaches ``compute_metrics``. A trial ends
early when it no longer improves, and keeps its best checkpoint. The best one is loaded again and writes a line.
Needs optuna; takes less than a minute on one core.
"""

import argparse
import shutil
from pathlib import Path

import optuna
import torch
from transformers import AutoModelForCausalLM, EarlyStoppingCallback

from ullage.datasets import byte_tokenizer, docstrings, split_held_out, tokenize
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.training import RaggedCollator, Trainer, TrainingArguments


def choose_model(trial):
    """What a trial may choose of the model."""
    return {
        "cell": trial.suggest_categorical("cell", ["lstm", "gru"]),
        "hidden_size": trial.suggest_categorical("hidden_size", [32, 64]),
    }


def space(trial):
    """What a trial may choose of the Trainer's arguments; the model is chosen too, for other processes to be told."""
    choose_model(trial)
    return {"learning_rate": trial.suggest_float("learning_rate", 5e-3, 1e-1, log=True)}


def make_model(trial):
    """A fresh model for each trial; the Trainer asks for one without a trial first."""
    chosen = {"cell": "lstm", "hidden_size": 32} if trial is None else choose_model(trial)
    tokenizer = byte_tokenizer()
    return RecurrentForCausalLM(
        RecurrentConfig(
            **chosen,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def accuracy(given):
    """``given.predictions`` and ``given.label_ids`` are arrays: one row a docstring, behind its end labels of -100."""
    guesses, labels = given.predictions[:, :-1], given.label_ids[:, 1:]
    return {"accuracy": (guesses == labels)[labels != -100].mean()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="runs/search")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--max_steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shutil.rmtree(options.output_dir, ignore_errors=True)

    tokenizer = byte_tokenizer()
    training, held_out = split_held_out([text[:100] for text in docstrings()[:2000]])
    trainer = Trainer(
        model_init=make_model,
        args=TrainingArguments(
            options.output_dir,
            max_steps=options.max_steps,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=50,
            eval_strategy="steps",
            eval_steps=20,
            save_steps=20,
            save_total_limit=1,
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        data_collator=RaggedCollator(labels_from="input_ids"),
        train_dataset=tokenize(training, tokenizer),
        eval_dataset=tokenize(held_out, tokenizer),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    best = trainer.hyperparameter_search(
        hp_space=space,
        compute_objective=lambda metrics: metrics["eval_accuracy"],
        direction="maximize",
        n_trials=options.trials,
        backend="optuna",
        sampler=optuna.samplers.TPESampler(seed=0),
    )
    print(f"\nbest: trial {best.run_id}, accuracy {best.objective:.3f}, {best.hyperparameters}")

    (checkpoint,) = Path(options.output_dir, f"run-{best.run_id}").glob("checkpoint-*")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    prompt = tokenizer("Return ", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    print(repr(tokenizer.decode(written[0], skip_special_tokens=True)))


if __name__ == "__main__":
    main()
