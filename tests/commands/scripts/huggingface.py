"""A language model made from a config, trained by the Trainer of Hugging Face."""

import tempfile

import torch
from planted import Slow
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 100, (count, 16), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(state.global_step, float(logs["loss"]).hex())


def main():
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    )
    mlp = model.transformer.h[1].mlp
    mlp.act = torch.nn.Sequential(mlp.act, Slow())
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=14,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(
            model=model, args=arguments, train_dataset=Sentences(64), callbacks=[PrintLoss()]
        )
        trainer.train()


main()
