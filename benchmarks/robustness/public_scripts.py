"""Public training scripts, and what each needs to run where there is no network.

A checkout of ``repository`` at ``commit`` lies in the folder ``repository`` of the folder of
checkouts. The scripts run as they are: sizes come from their own arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["COMMITS", "SCRIPTS", "Script"]

COMMITS = {
    "Lightning-AI/pytorch-lightning": "7f0c3436cd3f6ad3753125672024fc415cbcb414",
    "eriklindernoren/PyTorch-GAN": "36d3c77e5ff20ebe0aeefd322326a134a279b93e",
    "facebookresearch/schedule_free": "70785b53e778d0e872c0bbb75ff4ee54ee10c291",
    "huggingface/accelerate": "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
    "huggingface/peft": "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40",
    "huggingface/pytorch-image-models": "aa4b5850c1543fa488abf260f18390eda46cf85d",
    "karpathy/makemore": "988aa59e4d8fefa526d06f3b453ad116258398d4",
    "karpathy/minGPT": "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
    "karpathy/nanoGPT": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    "locuslab/TCN": "2f8c2b817050206397458dfd1f5a25ce8a32fe65",
    "lucidrains/x-transformers": "9252ed7838021ee61e6c5be0930b3a9a88efdf06",
    "milesial/Pytorch-UNet": "21d7850f2af30a9695bbeea75f3136aa538cfc4a",
    "pyg-team/pytorch_geometric": "5c6461b2305ad068a6d61165b3c55852a11aaa41",
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "pytorch/ignite": "de08e799cfb55a6cf4aa778575d6bad725385453",
    "tkipf/pygcn": "1600b5b748b3976413d1e307540ccc62605b4d6d",
    "vwxyzjn/cleanrl": "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
}


@dataclass(frozen=True)
class Script:
    """A public script.

    Attributes:
        repository: whose checkout has it.
        file: the script, from the working folder.
        folder: the working folder, from the checkout.
        arguments: what the script is called with.
        data: toy data: each a kind, a path from the working folder, and sizes (``toy_data.py``).
        needs: packages beside torch that must be there.
        stubbed: what else stands in for something that is not there.
        timings: regular expressions of what the script prints about its own speed.
        path: folders, from the working folder, that the script imports from.
        interrupt: text on standard output after which Ctrl-C is pressed.
        devices: where it runs.
        options: of ``backspot run``.
    """

    repository: str
    file: str
    folder: str = ""
    arguments: tuple[str, ...] = ()
    data: tuple[tuple[Any, ...], ...] = ()
    needs: tuple[str, ...] = ()
    stubbed: str = ""
    timings: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    interrupt: str = ""
    devices: tuple[str, ...] = ("cpu",)
    options: tuple[str, ...] = ()


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def example(folder: str, arguments: str = "", file: str = "main.py", **more: Any) -> Script:
    """One of PyTorch's examples."""
    return Script("pytorch/examples", file, folder, words(arguments), **more)


BOTH = ("cpu", "cuda")
CUDA = ("cuda",)
_GPT = "--dataset=toy --eval_iters=2 --log_interval=5 --max_iters={} --eval_interval=1000"
_SMALL_GPT = " --n_layer=3 --n_head=4 --n_embd=128 --block_size=64 --batch_size=8"
_ON_CPU = " --device=cpu --compile=False --gradient_accumulation_steps=2"
_MNIST = (("mnist", "../data", 2400, 200),)

SCRIPTS = {
    # PyTorch's examples
    "mnist": example("mnist", "--epochs 1 --batch-size 32", data=_MNIST, needs=("torchvision",)),
    "mnist_rnn": example(
        "mnist_rnn", "--epochs 1 --batch-size 32", data=_MNIST, needs=("torchvision",)
    ),
    "mnist_forward_forward": example(
        "mnist_forward_forward",
        "--epochs 30 --train_size 200 --test_size 100 --no_accel",
        data=(("mnist", "data", 400, 100),),
        needs=("torchvision",),
    ),
    "siamese_network": example(
        "siamese_network",
        "--epochs 1 --batch-size 4 --test-batch-size 50 --no-accel",
        data=(("mnist", "../data", 130, 100),),
        needs=("torchvision",),
    ),
    "vae": example(
        "vae", "--epochs 1 --no-accel --batch-size 64", data=(*_MNIST, ("folder", "results"))
    ),
    "dcgan": example(
        "dcgan",
        "--dataset folder --dataroot pictures --imageSize 64 --batchSize 8 --ngf 16 --ndf 16 "
        "--niter 1 --manualSeed 1 --workers 0",
        data=(("images", "pictures", 2, 140, 64),),
        needs=("torchvision",),
    ),
    "word_language_model-lstm": example(
        "word_language_model",
        "--epochs 1 --emsize 64 --nhid 64 --bptt 16 --log-interval 10",
        data=(("corpus", "data/wikitext-2", 20_000, 4000),),
        timings=(r"ms/batch\s+[\d.]+", r"time:\s+[\d.]+s"),
    ),
    "word_language_model-transformer": example(
        "word_language_model",
        "--model Transformer --lr 5 --epochs 1 --emsize 64 --nhid 64 --bptt 16 --log-interval 10",
        data=(("corpus", "data/wikitext-2", 20_000, 4000),),
        timings=(r"ms/batch\s+[\d.]+", r"time:\s+[\d.]+s"),
    ),
    "time_sequence_prediction": example(
        "time_sequence_prediction",
        "--steps 8",
        "train.py",
        data=(("waves", "traindata.pt", 20, 60),),
        options=("--warmup", "1", "--steps", "2"),
        needs=("matplotlib",),
    ),
    "super_resolution": example(
        "super_resolution",
        "--upscale_factor 3 --batchSize 2 --testBatchSize 2 --nEpochs 1 --threads 0",
        data=(
            ("images", "dataset/BSDS300/images/train", 0, 80, 260),
            ("images", "dataset/BSDS300/images/test", 0, 4, 260),
        ),
        needs=("six",),
    ),
    "regression": example("regression", ""),
    "gat": example(
        "gat",
        "--epochs 30 --no-accel --hidden-dim 8 --num-heads 2 --val-every 10",
        data=(("cora", "cora", 1650, 100),),
        needs=("requests",),
    ),
    "reinforce": example(
        "reinforcement_learning", "", "reinforce.py", needs=("gymnasium",), interrupt="Episode 60"
    ),
    "actor_critic": example(
        "reinforcement_learning",
        "",
        "actor_critic.py",
        needs=("gymnasium",),
        interrupt="Episode 60",
    ),
    "fast_neural_style": example(
        "fast_neural_style",
        "train --epochs 1 --batch-size 1 --dataset pictures --style-image style/picture0.jpg "
        "--save-model-dir models --image-size 64 --log-interval 10",
        "neural_style/neural_style.py",
        data=(
            ("images", "pictures", 1, 40, 72),
            ("images", "style", 0, 1, 72),
            ("vgg16", "torch_home/hub/checkpoints"),
        ),
        timings=(r"\w+ \w+ +\d+ \d\d:\d\d:\d\d \d{4}", r"epoch_\d_\w+\.model"),
        stubbed="VGG16 with random weights, in torchvision's cache",
        needs=("torchvision",),
    ),
    "imagenet": example(
        "imagenet",
        "-a resnet18 --epochs 1 -b 4 -j 1 --seed 1 --no-accel -p 5 pictures",
        data=(
            ("images", "pictures/train", 4, 30, 72),
            ("images", "pictures/val", 4, 2, 72),
        ),
        needs=("torchvision",),
        timings=(r"Time +[\d.]+ \( *[\d.]+\)", r"Data +[\d.]+ \( *[\d.]+\)"),
    ),
    "imagenet-ctrl-c": example(
        "imagenet",
        "-a mobilenet_v3_small --epochs 1 -b 2 -j 1 --no-accel -p 5 --dummy",
        interrupt=" 41/",
        needs=("torchvision",),
    ),
    # GPTs
    "nanoGPT": Script(
        "karpathy/nanoGPT",
        "train.py",
        "",
        words(_GPT.format(60) + _SMALL_GPT + _ON_CPU),
        (("tokens", "data/toy", 20_000, 65),),
        timings=(r"time [\d.]+ms", r"mfu -?[\d.]+%"),
    ),
    "minGPT-chargpt": Script(
        "karpathy/minGPT",
        "projects/chargpt/chargpt.py",
        "",
        words(
            "--trainer.max_iters=60 --trainer.batch_size=8 --trainer.num_workers=0 "
            "--model.model_type=gpt-nano --data.block_size=64"
        ),
        (("text", "input.txt", 4000),),
        path=("",),
        timings=(r"iter_dt [\d.]+ms",),
    ),
    "minGPT-adder": Script(
        "karpathy/minGPT",
        "projects/adder/adder.py",
        "",
        words("--trainer.max_iters=60 --trainer.num_workers=0"),
        path=("",),
        timings=(r"iter_dt [\d.]+ms",),
    ),
    "makemore-transformer": Script(
        "karpathy/makemore",
        "makemore.py",
        "",
        words("--max-steps 100 --num-workers 0"),
        timings=(r"step time [\d.]+ms",),
        needs=("tensorboard",),
    ),
    "makemore-gru": Script(
        "karpathy/makemore",
        "makemore.py",
        "",
        words("--max-steps 60 --type gru --num-workers 0"),
        timings=(r"step time [\d.]+ms",),
        needs=("tensorboard",),
    ),
    "x-transformers-copy": Script(
        "lucidrains/x-transformers",
        "train_copy.py",
        "",
        needs=("einops", "einx", "loguru"),
        interrupt="40: ",
    ),
    # Trainers
    "timm": Script(
        "huggingface/pytorch-image-models",
        "train.py",
        "",
        words(
            "--data-dir pictures --model resnet18 --img-size 64 -b 4 --epochs 1 --workers 1 "
            "--device cpu --num-classes 4 --log-interval 5"
        ),
        (
            ("images", "pictures/train", 4, 30, 72),
            ("images", "pictures/validation", 4, 2, 72),
        ),
    ),
    "accelerate-nlp": Script(
        "huggingface/accelerate",
        "nlp_example.py",
        "examples",
        ("--cpu",),
        (
            ("bert", "bert-base-cased", 64, 2),
            ("glue", "nyu-mll/glue", "mrpc", 240, 20),
            ("metric", "glue"),
        ),
        needs=("transformers", "accelerate", "datasets", "evaluate"),
        stubbed="BERT of 2 layers with random weights; GLUE of random words; the metric",
    ),
    "peft-frod-trainer": Script(
        "huggingface/peft",
        "frod_text_classification.py",
        "examples/frod_finetuning",
        words(
            "--model_name_or_path bert --dataset_name glue --per_device_train_batch_size 4 "
            "--use_cpu --disable_tqdm true --logging_steps 5"
        ),
        (("bert", "bert", 64, 2), ("glue", "glue", "sst2", 160, 20)),
        needs=("transformers", "peft", "datasets"),
        stubbed="BERT of 2 layers with random weights; GLUE of random words",
        timings=(r"'\w+_(runtime|per_second)': '?[\d.]+'?",),
    ),
    "lightning-autoencoder": Script(
        "Lightning-AI/pytorch-lightning",
        "autoencoder.py",
        "examples/pytorch/basics",
        words(
            "--trainer.max_epochs=1 --trainer.limit_train_batches=60 --trainer.limit_val_batches=2 "
            "--trainer.limit_test_batches=2 --trainer.limit_predict_batches=2 "
            "--trainer.accelerator=cpu --trainer.enable_progress_bar=false"
        ),
        (("mnist", "../../Datasets", 60_000, 10_000),),
        needs=("lightning", "jsonargparse", "torchvision"),
    ),
    "fabric-image_classifier": Script(
        "Lightning-AI/pytorch-lightning",
        "train_fabric.py",
        "examples/fabric/image_classifier",
        words("--epochs 1 --batch-size 32"),
        (("mnist", "../../../Datasets", 1600, 100),),
        needs=("lightning", "torchvision"),
    ),
    "ignite-mnist": Script(
        "pytorch/ignite",
        "mnist.py",
        "examples/mnist",
        words("--epochs 1 --batch_size 32"),
        (("mnist", ".", 1600, 100),),
        needs=("ignite", "torchvision"),
        timings=(r"\d\d:\d\d:\d\d",),
    ),
    # Others
    "schedule_free-mnist": Script(
        "facebookresearch/schedule_free",
        "main.py",
        "examples/mnist",
        words("--epochs 1 --batch-size 32 --no-cuda"),
        _MNIST,
        path=("../..",),
    ),
    "gan": Script(
        "eriklindernoren/PyTorch-GAN",
        "gan.py",
        "implementations/gan",
        words("--n_epochs 1 --batch_size 32"),
        (("mnist", "../../data/mnist", 1600, 10),),
    ),
    "wgan_gp": Script(
        "eriklindernoren/PyTorch-GAN",
        "wgan_gp.py",
        "implementations/wgan_gp",
        words("--n_epochs 1 --batch_size 16"),
        (("mnist", "../../data/mnist", 3200, 10),),
    ),
    "unet": Script(
        "milesial/Pytorch-UNet",
        "train.py",
        "",
        words("--epochs 1 --batch-size 1 --scale 1"),
        (("masks", "data", 40, 48),),
        needs=("wandb",),
        stubbed="Weights & Biases, switched off by its own variable",
    ),
    "tcn-adding": Script(
        "locuslab/TCN",
        "add_test.py",
        "TCN/adding_problem",
        words("--epochs 1 --seq_len 60 --levels 4 --log-interval 100"),
        path=("../..",),
        interrupt="Train Epoch:  1 [",
    ),
    "pygcn": Script(
        "tkipf/pygcn",
        "train.py",
        "pygcn",
        words("--epochs 60 --no-cuda"),
        (("cora", "../data/cora", 1500, 300),),
        needs=("scipy",),
        path=("..",),
        timings=(r"time: [\d.]+s",),
    ),
    "pyg-gcn": Script(
        "pyg-team/pytorch_geometric",
        "gcn.py",
        "examples",
        words("--epochs 60"),
        (("planetoid", "../data/Planetoid/Cora/raw", 2000, 500),),
        needs=("torch_geometric", "scipy"),
        timings=(r"time per epoch: [\d.]+",),
    ),
    "cleanrl-ppo": Script(
        "vwxyzjn/cleanrl",
        "cleanrl/ppo.py",
        "",
        words("--total-timesteps 2048 --no-cuda"),
        needs=("gymnasium", "tyro", "tensorboard"),
        timings=(r"SPS: \d+",),
    ),
    # On a GPU
    "nanoGPT-cuda": Script(
        "karpathy/nanoGPT",
        "train.py",
        "",
        words(_GPT.format(60) + " --gradient_accumulation_steps=2 --compile=False"),
        (("tokens", "data/toy", 200_000, 50304),),
        timings=(r"time [\d.]+ms", r"mfu -?[\d.]+%"),
        devices=CUDA,
    ),
    "nanoGPT-cuda-compiled": Script(
        "karpathy/nanoGPT",
        "train.py",
        "",
        words(_GPT.format(60) + " --gradient_accumulation_steps=2"),
        (("tokens", "data/toy", 200_000, 50304),),
        timings=(r"time [\d.]+ms", r"mfu -?[\d.]+%"),
        devices=CUDA,
    ),
    "timm-cuda": Script(
        "huggingface/pytorch-image-models",
        "train.py",
        "",
        words(
            "--data-dir pictures --model resnet50 -b 32 --epochs 1 --workers 4 --amp "
            "--num-classes 4 --log-interval 5"
        ),
        (
            ("images", "pictures/train", 4, 300, 240),
            ("images", "pictures/validation", 4, 8, 240),
        ),
        devices=CUDA,
    ),
    "imagenet-cuda-ctrl-c": example(
        "imagenet",
        "-a resnet50 --epochs 1 -b 64 -j 8 -p 5 --dummy",
        interrupt=" 41/",
        needs=("torchvision",),
        devices=CUDA,
    ),
    "peft-frod-trainer-cuda": Script(
        "huggingface/peft",
        "frod_text_classification.py",
        "examples/frod_finetuning",
        words(
            "--model_name_or_path bert --dataset_name glue --disable_tqdm true --logging_steps 5"
        ),
        (
            ("bert", "bert", 768, 12),
            ("glue", "glue", "sst2", 1600, 60),
            ("datasets", "datasets.py"),
        ),
        needs=("transformers", "accelerate"),
        path=("../../src",),
        stubbed="BERT with random weights; GLUE of random words; the package datasets",
        timings=(r"'\w+_(runtime|per_second)': '?[\d.]+'?",),
        devices=CUDA,
    ),
}
