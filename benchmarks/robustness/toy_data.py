"""Toy data in the formats that public training scripts read, for machines without a network.

Random numbers and words: the shapes are real, there is nothing to learn.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import pickle
import struct
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["make"]

KINDS: dict[str, Callable[..., None]] = {}


def kind(function: Callable[..., None]) -> Callable[..., None]:
    KINDS[function.__name__] = function
    return function


def make(folder: Path, what: tuple[Any, ...]) -> None:
    """Make data.

    Args:
        folder: the script's working folder.
        what: a kind of data, its path from that folder, and how much of it.
    """
    name, path, *sizes = what
    KINDS[name](folder / path, *sizes)


def _words(count: int, distinct: int) -> list[str]:
    numbers = np.random.default_rng(0).zipf(1.3, count) % distinct
    return [f"w{number}" for number in numbers]


@kind
def folder(path: Path) -> None:
    """An empty folder."""
    path.mkdir(parents=True, exist_ok=True)


@kind
def mnist(path: Path, train: int, test: int) -> None:
    """The four files of MNIST, as torchvision unpacks them."""
    raw = path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, count in (("train", train), ("t10k", test)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, count, dtype=np.uint8)
        head = struct.pack(">IIII", 2051, count, 28, 28)
        for file, content in (
            (f"{name}-images-idx3-ubyte", head + images.tobytes()),
            (f"{name}-labels-idx1-ubyte", struct.pack(">II", 2049, count) + labels.tobytes()),
        ):
            (raw / file).write_bytes(content)
            (raw / f"{file}.gz").write_bytes(gzip.compress(b""))


@kind
def images(
    path: Path, classes: int, each: int, side: int, suffix: str = ".jpg", distinct: int = 0
) -> None:
    """Folders of pictures, a folder for each class; 0 classes: no such folders.

    With ``distinct``, a folder has so many of its own, and copies of them.
    """
    from PIL import Image

    random = np.random.default_rng(0)
    for folder in [path / f"class{n}" for n in range(classes)] or [path]:
        folder.mkdir(parents=True, exist_ok=True)
        drawn = min(each, distinct or each)
        for number in range(drawn):
            pixels = random.integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"picture{number}{suffix}")
        for number in range(drawn, each):
            like = folder / f"picture{number % drawn}{suffix}"
            (folder / f"picture{number}{suffix}").write_bytes(like.read_bytes())


@kind
def corpus(path: Path, words: int, distinct: int) -> None:
    """train.txt, valid.txt and test.txt: lines of words."""
    path.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", words), ("valid", words // 20), ("test", words // 20)):
        found = _words(count, distinct)
        lines = (" ".join(found[n : n + 12]) for n in range(0, count, 12))
        (path / f"{name}.txt").write_text("\n".join(lines) + "\n")


@kind
def text(path: Path, words: int) -> None:
    """One file of text."""
    path.write_text("O God, O God!\n" + " ".join(_words(words, 500)) + "\n", encoding="utf-8")


@kind
def tokens(path: Path, count: int, distinct: int) -> None:
    """train.bin and val.bin, as nanoGPT prepares them."""
    path.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for name in ("train", "val"):
        random.integers(0, distinct, count, dtype=np.uint16).tofile(path / f"{name}.bin")
    with (path / "meta.pkl").open("wb") as file:
        pickle.dump({"vocab_size": distinct}, file)


@kind
def nanochat(path: Path, pairs: int = 0, length: int = 60, texts: int = 1000) -> None:
    """What nanochat keeps beside its code: a tokenizer, and two shards of text.

    Args:
        path: the folder.
        pairs: how many tokens of two bytes there are beside those of one.
        length: words of a text.
        texts: how many a shard has.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    import tiktoken
    import torch

    special = ["bos", *(f"{who}_{what}" for who in _SPEAKERS for what in ("start", "end"))]
    known = [bytes([number]) for number in range(256)]
    known += [number.to_bytes(2, "big") for number in range(pairs)]
    encoding = tiktoken.Encoding(
        name="bytes",
        pat_str=r"\S+|\s+",
        mergeable_ranks={token: n for n, token in enumerate(known)},
        special_tokens={f"<|{name}|>": len(known) + n for n, name in enumerate(special)},
    )
    tokenizer, data = path / "tokenizer", path / "base_data_climbmix"
    for folder in (tokenizer, data):
        folder.mkdir(parents=True)
    with (tokenizer / "tokenizer.pkl").open("wb") as file:
        pickle.dump(encoding, file)
    sizes = torch.tensor([*map(len, known), *(0 for _ in special)], dtype=torch.int32)
    torch.save(sizes, tokenizer / "token_bytes.pt")
    words = _words(texts * length, 500)
    lines = [" ".join(words[n : n + length]) for n in range(0, len(words), length)]
    for shard in range(2):
        pq.write_table(
            pa.table({"text": lines}), data / f"shard_{shard:05d}.parquet", row_group_size=100
        )


_SPEAKERS = "user", "assistant", "python", "output"


@kind
def names(path: Path, languages: int, each: int) -> None:
    """A file of names for each language."""
    path.mkdir(parents=True)
    random = np.random.default_rng(0)
    for language in range(languages):
        letters = random.integers(97, 123, (each, 8), dtype=np.uint8)
        lines = (bytes(row).decode() for row in letters)
        (path / f"language{language}.txt").write_text("\n".join(lines) + "\n")


@kind
def cora(path: Path, papers: int, features: int) -> None:
    """cora.content and cora.cites."""
    path.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    with (path / "cora.content").open("w") as file:
        for number in range(papers):
            bits = " ".join(map(str, (random.random(features) < 0.02).astype(int)))
            file.write(f"{number} {bits} topic{number % 7}\n")
    with (path / "cora.cites").open("w") as file:
        pairs = {tuple(sorted(pair)) for pair in random.integers(0, papers, (2 * papers, 2))}
        for cited, citing in sorted(pairs):
            file.write(f"{cited} {citing}\n" if cited != citing else "")


@kind
def ett(path: Path, hours: int) -> None:
    """ETTh1.csv: seven columns of each hour, daily waves with noise."""
    path.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    times = np.datetime64("2016-07-01T00:00:00") + np.arange(hours).astype("timedelta64[h]")
    waves = np.sin(np.arange(hours)[:, None] * np.pi / 12 + np.arange(7))
    rows = waves + random.normal(0, 0.3, (hours, 7))
    with (path / "ETTh1.csv").open("w") as file:
        file.write("date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT\n")
        for time, row in zip(times, rows, strict=True):
            values = ",".join(f"{value:.4f}" for value in row)
            file.write(f"{str(time).replace('T', ' ')},{values}\n")


@kind
def waves(path: Path, count: int, length: int) -> None:
    """Sine waves of different phases in one tensor file."""
    import torch

    phases = np.random.default_rng(0).integers(-80, 80, (count, 1))
    torch.save(np.sin((np.arange(length) + phases) / 20.0), path)


def _sizes(width: int, layers: int) -> dict[str, int]:
    """The sizes of a small model of Transformers."""
    return {
        "vocab_size": 1005,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, width // 32),
        "intermediate_size": 4 * width,
    }


@kind
def bert(path: Path, width: int, layers: int) -> None:
    """A small BERT with a tokenizer of whole words."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(**_sizes(width, layers))
    BertForSequenceClassification(config).save_pretrained(path)
    _tokenizer(path)


@kind
def llama(path: Path, width: int, layers: int) -> None:
    """A small Llama with a tokenizer of whole words."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**_sizes(width, layers))
    LlamaForCausalLM(config).save_pretrained(path)
    _tokenizer(path, "eos_token")


@kind
def instructions(path: Path, rows: int) -> None:
    """Instructions as Alpaca has them, in a folder that ``load_dataset`` reads."""
    path.mkdir(parents=True)
    found = _words(rows * 30, 1000)
    with (path / "train.json").open("w") as file:
        for number in range(rows):
            asked, given, answered = (
                " ".join(found[30 * number + n : 30 * number + n + 10]) for n in (0, 10, 20)
            )
            row = {"instruction": asked, "input": given, "output": answered}
            file.write(json.dumps(row) + "\n")


def _tokenizer(path: Path, *further: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token", *further)
    special = {name: f"[{name[:-6].upper()}]" for name in names}
    words = [*special.values(), *(f"w{n}" for n in range(1000 - len(further)))]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(path)


@kind
def glue(path: Path, task: str, rows: int, length: int) -> None:
    """A task of GLUE in a local folder that ``load_dataset`` takes for the hub's."""
    path.mkdir(parents=True)
    names = {"mrpc": ("sentence1", "sentence2"), "sst2": ("sentence",)}[task]
    found = _words(3 * rows * length * len(names), 1000)
    files = []
    for split in ("train", "validation", "test"):
        with (path / f"{split}.json").open("w") as file:
            for number in range(rows):
                row: dict[str, Any] = {"idx": number, "label": number % 2}
                for name in names:
                    # Sentences differ in length, as real ones do.
                    row[name] = " ".join(found.pop() for _ in range(length - number % 7))
                file.write(json.dumps(row) + "\n")
        files.append(f"  - split: {split}\n    path: {split}.json\n")
    head = f"---\nconfigs:\n- config_name: {task}\n  data_files:\n{''.join(files)}---\n"
    (path / "README.md").write_text(head)


_DATASETS = '''"""A stand-in for the package of the same name: tables in files of JSON lines."""
import json
import pathlib


class Dataset:
    pass


class Table:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def map(self, function, batched=False):
        columns = function({name: [row[name] for row in self.rows] for name in self.rows[0]})
        return Table([
            row | {name: column[n] for name, column in columns.items()}
            for n, row in enumerate(self.rows)
        ])

    def rename_column(self, old, new):
        return Table([{new if k == old else k: v for k, v in row.items()} for row in self.rows])


class Tables(dict):
    def map(self, function, **options):
        return Tables({name: table.map(function, **options) for name, table in self.items()})

    def rename_column(self, old, new):
        return Tables({name: table.rename_column(old, new) for name, table in self.items()})


def load_dataset(folder, task=None):
    return Tables({
        path.stem: Table([json.loads(line) for line in path.open()])
        for path in sorted(pathlib.Path(folder).glob("*.json"))
    })
'''


@kind
def datasets(path: Path) -> None:
    """A small stand-in for the package ``datasets``, for machines that lack it."""
    path.write_text(_DATASETS, encoding="utf-8")


_IMAGE_FOLDER = '''"""A stand-in for the package of the same name: a folder of pictures."""
import pathlib
from types import SimpleNamespace

from PIL import Image

utils = SimpleNamespace(
    logging=SimpleNamespace(
        set_verbosity_warning=lambda: None, set_verbosity_error=lambda: None
    )
)


class Dataset:
    def __init__(self, folder):
        self.paths = sorted(pathlib.Path(folder).rglob("*.jpg"))
        self.transform = None

    def set_transform(self, transform):
        self.transform = transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        row = {"image": [Image.open(self.paths[index])]}
        return {name: column[0] for name, column in self.transform(row).items()}


def load_dataset(kind, data_dir, cache_dir=None, split=None):
    assert kind == "imagefolder"
    return Dataset(data_dir)
'''


@kind
def image_datasets(path: Path) -> None:
    """A small stand-in for the package ``datasets`` that reads a folder of pictures."""
    path.write_text(_IMAGE_FOLDER, encoding="utf-8")


_WANDB = '''"""A stand-in for the package of the same name: a run that keeps nothing."""
from types import SimpleNamespace

__version__ = "0.1"
says = {says}
Image = staticmethod(lambda *_: None)
config = SimpleNamespace(update=lambda *_, **__: None)


def log(values, **_):
    if says:
        print(values)


def init(*_, **__):
    return SimpleNamespace(log=log, finish=lambda: None, config=config)
'''


@kind
def wandb(path: Path, says: bool = False) -> None:
    """A stand-in for the package ``wandb``, for machines that lack it, as if it was installed.

    With ``says``, it prints what it is given.
    """
    path.write_text(_WANDB.format(says=says), encoding="utf-8")
    about = path.with_name("wandb-0.1.dist-info")
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: wandb\nVersion: 0.1\n")


_MPI4PY = '''"""A stand-in for the package of the same name: one process, alone in its world."""


class _World:
    rank, size = 0, 1

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def bcast(self, what, root=0):
        return what

    def gather(self, what, root=0):
        return [what]


class MPI:
    COMM_WORLD = _World()
'''


@kind
def mpi4py(path: Path) -> None:
    """A stand-in for the package ``mpi4py``, for one process where there is no MPI."""
    path.write_text(_MPI4PY, encoding="utf-8")


_ABSENT = '''"""A stand-in for a package that is imported and, as here, not used."""
def __getattr__(name):
    return type(name, (Exception,), {})
'''


@kind
def unused(path: Path, *modules: str) -> None:
    """A stand-in for a package that is imported, not used, and not installed.

    With ``modules``, a folder that has these of its modules.
    """
    if importlib.util.find_spec(path.stem) is not None:
        return
    if modules:
        path.mkdir()
    for file in [path / f"{name}.py" for name in ("__init__", *modules)] if modules else [path]:
        file.write_text(_ABSENT, encoding="utf-8")


_LIBROSA = '''"""A stand-in for the module of the same name: the mel filters, by Transformers."""
from transformers.audio_utils import mel_filter_bank


def mel(*, sr, n_fft, n_mels, fmin, fmax):
    bins = n_fft // 2 + 1
    filters = mel_filter_bank(bins, n_mels, fmin, fmax or sr / 2, sr, "slaney", "slaney")
    return filters.T.astype("float32")
'''

_FFMPEG = '''"""A stand-in for the package of the same name: reads WAV files of 16 bits."""
import wave

import numpy


class input:
    def __init__(self, path, **_):
        self.path = path

    def output(self, *_, **__):
        return self

    def run(self, **_):
        with wave.open(self.path) as file:
            samples = numpy.frombuffer(file.readframes(file.getnframes()), numpy.int16)
        return (samples / 32768).astype(numpy.float32).tobytes(), b""
'''

_I18N = '''"""A stand-in for the module of the same name: it translates nothing."""
class I18nAuto:
    def __init__(self, **_):
        pass

    def __call__(self, text):
        return text
'''


@kind
def speech_packages(path: Path) -> None:
    """Stand-ins for ``librosa.filters`` and ``ffmpeg``, and for translations if there are none."""
    files = {"librosa/__init__.py": "", "librosa/filters.py": _LIBROSA, "ffmpeg.py": _FFMPEG}
    if not (path / "tools/i18n/i18n.py").exists():
        files["tools/i18n/i18n.py"] = _I18N
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text, encoding="utf-8")


@kind
def sovits(path: Path, device: str, count: int, seconds: int, batch: int, epochs: int) -> None:
    """What GPT-SoVITS prepares for its second stage: noise as speech, and its configuration.

    The sizes of the model are the repository's own on ``cuda``, and smaller ones on ``cpu``.
    The pretrained weights are those of the codebook alone: without them its first step is k-means.
    """
    import torch

    root, random = path.parents[1], np.random.default_rng(0)
    for name in ("4-cnhubert", "5-wav32k", "logs_s2_v2"):
        (path / name).mkdir(parents=True)
    lines = []
    for number in range(count):
        name = f"speech{number}.wav"
        frames = int(random.integers(35, 50 * seconds))
        with wave.open(str(path / "5-wav32k" / name), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(32000)
            file.writeframes(random.normal(0, 3000, 640 * frames).astype(np.int16).tobytes())
        features = torch.from_numpy(random.normal(0, 1, (1, 768, frames))).half()
        torch.save(features, path / "4-cnhubert" / f"{name}.pt")
        phonemes = " ".join(random.choice(["b", "AA", "m", "OO", "SP"], frames // 8))
        lines.append(f"{name}\t{phonemes}\tNone\ttext\n")
    (path / "2-name2text.txt").write_text("".join(lines))
    codes = torch.from_numpy(random.normal(0, 0.5, (1024, 768))).float()
    codebook = {"inited": torch.ones(1), "cluster_size": torch.ones(1024)}
    codebook |= {"embed": codes, "embed_avg": codes}
    weights = {f"quantizer.vq.layers.0._codebook.{name}": one for name, one in codebook.items()}
    torch.save({"weight": weights}, path / "s2G.pth")

    config = json.loads((root / "GPT_SoVITS/configs/s2.json").read_text())
    where = str(path.relative_to(root))
    config |= {"s2_ckpt_dir": where, "save_weight_dir": where, "name": "toy", "version": "v2"}
    config["data"]["exp_dir"] = where
    config["model"]["version"] = "v2"
    config["train"] |= {"batch_size": batch, "epochs": epochs, "log_interval": 5}
    config["train"] |= {"pretrained_s2G": f"{where}/s2G.pth", "pretrained_s2D": ""}
    config["train"] |= {"if_save_latest": 1, "if_save_every_weights": False}
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0")  # the script sets it to what it reads here
    config["train"] |= {"save_every_epoch": epochs + 1, "gpu_numbers": gpu}
    if device == "cpu":
        config["train"] |= {"gpu_numbers": "", "fp16_run": False, "segment_size": 1280}
        config["model"] |= {"n_layers": 2, "filter_channels": 64, "upsample_initial_channel": 64}
    (path / "s2.json").write_text(json.dumps(config))


@kind
def unet(path: Path, *widths: int) -> None:
    """The configuration of a small U-Net of diffusers, with attention at its bottom."""
    path.mkdir(parents=True, exist_ok=True)
    levels = len(widths)
    config = {
        "_class_name": "UNet2DModel",
        "sample_size": 32,
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "block_out_channels": widths,
        "down_block_types": [*["DownBlock2D"] * (levels - 1), "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", *["UpBlock2D"] * (levels - 1)],
    }
    (path / "config.json").write_text(json.dumps(config))


@kind
def weights(path: Path, name: str) -> None:
    """Random weights of a model where torchvision looks for downloaded ones."""
    import torch
    from torchvision import models

    path.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    url = models.get_model_weights(name)["IMAGENET1K_V1"].url
    torch.save(models.get_model(name).state_dict(), path / url.rpartition("/")[2])


@kind
def hub(path: Path) -> None:
    """A repository without a model in the cache of torch.hub."""
    path.mkdir(parents=True)
    (path / "hubconf.py").write_text("")


@kind
def coco(path: Path, train: int, val: int, width: int, height: int, distinct: int = 16) -> None:
    """COCO of 2017: smooth pictures with some boxes each, in files that pictures share."""
    from PIL import Image

    random = np.random.default_rng(0)
    (path / "annotations").mkdir(parents=True)
    for split, count in (("train2017", train), ("val2017", val)):
        (path / split).mkdir()
        for number in range(min(count, distinct)):
            pixels = random.integers(0, 256, (24, 24, 3), dtype=np.uint8)
            picture = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
            picture.save(path / split / f"{number:012d}.jpg")
        pictures: list[dict[str, Any]] = []
        boxes: list[dict[str, Any]] = []
        for number in range(1, count + 1):
            file = f"{number % min(count, distinct):012d}.jpg"
            pictures.append({"id": number, "file_name": file, "width": width, "height": height})
            for _ in range(int(random.integers(3, 12))):
                across, down = random.uniform(0.2, 0.7, 2)
                left, top = random.uniform(0, (1 - across, 1 - down))
                box = [left * width, top * height, across * width, down * height]
                boxes.append(
                    {
                        "id": len(boxes) + 1,
                        "image_id": number,
                        "category_id": int(random.integers(1, 91)),
                        "bbox": [round(float(side), 2) for side in box],
                        "area": round(float(box[2] * box[3]), 2),
                        "iscrowd": 0,
                    }
                )
        names = [{"id": number, "name": f"thing{number}"} for number in range(1, 91)]
        table = {"info": {}, "images": pictures, "annotations": boxes, "categories": names}
        (path / "annotations" / f"instances_{split}.json").write_text(json.dumps(table))
