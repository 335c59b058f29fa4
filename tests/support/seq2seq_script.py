"""Trains an encoder-decoder a little and lets it generate, on however many processes it is started; prints JSON."""

import json
import sys

import numpy as np
import torch

from ullage.models import RecurrentEncoderDecoder, RecurrentEncoderDecoderConfig
from ullage.training import Seq2SeqCollator, Seq2SeqTrainer, Seq2SeqTrainingArguments


def exact_match(prediction):
    pairs = list(zip(prediction.predictions, prediction.label_ids, strict=True))
    return {"exact_match": sum(list(ids[1:]) == list(labels) for ids, labels in pairs) / len(pairs)}


def main():
    folder, world = sys.argv[1], int(sys.argv[2])
    generator = np.random.default_rng(0)
    sources = [generator.integers(3, 8, length).tolist() for length in generator.integers(1, 7, 40)]
    samples = [{"input_ids": source, "labels": [*source[::-1], 2]} for source in sources]
    torch.manual_seed(0)
    config = RecurrentEncoderDecoderConfig(
        cell="gru", attention="dot", vocab_size=8, hidden_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    trainer = Seq2SeqTrainer(
        model=RecurrentEncoderDecoder(config),
        args=Seq2SeqTrainingArguments(
            folder,
            max_steps=60,
            learning_rate=1e-2,
            per_device_train_batch_size=8 // world,
            per_device_eval_batch_size=5,
            predict_with_generate=True,
            ragged_predictions=True,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        data_collator=Seq2SeqCollator(),
        train_dataset=samples,
        eval_dataset=samples,
        compute_metrics=exact_match,
    )
    trainer.train()
    output = trainer.predict(samples[:37], num_beams=2, max_new_tokens=8)
    if trainer.is_world_process_zero():
        found = {"predictions": [row.tolist() for row in output.predictions], **output.metrics}
        print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
