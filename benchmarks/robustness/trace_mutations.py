"""Ways to break a trace: each is a function of events or bytes, and of a random generator."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from random import Random
from typing import Any

Event = dict[str, Any]

_NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 0.5, -0.0, 1e-9, 127, 128, 4096, 2**31, 2**53 + 1, 2**61, 2**62, 2**63 - 1, 2**63,
    2**64 - 1, 2**64, -(2**63), 10**30, 2.8e15, 2.9e15, -1e12, 1e18, 1e308, True, False, None,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
_NAMES = (
    "", "a", "forward: ", "forward: a (A)", "forward: a.b (B) #2", "forward:  (A)",
    "backward: a (A)",
    "backward end: a (A)", "forward: a%2", "ProfilerStep#1", "ProfilerStep#",
    "Optimizer.step#SGD.step",
    "Optimizer.zero_grad#SGD.zero_grad", "enumerate(DataLoader)#x.__next__", "AccumulateGrad",
    "autograd::engine::evaluate_function: ", "autograd::engine::evaluate_function: AddmmBackward0",
    "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
    "CompiledFunctionBackward",
    "Torch-Compiled Region: 0/0", "nn.Module: Linear_0", "nn.Module: ",
    "[pl][module]torch.nn.Linear: a",
    "[pl][profile]training_step", "cudaGraphLaunch", "cudaStreamSynchronize",
    "Memcpy HtoD (Pageable)",
    "ncclDevKernel", "aten::item", "cudaLaunchKernel", "CheckpointFunctionBackward",
    "\0\x01\x1b[2J",
    "\ud800", "漢" * 99, "n" * 20_000, "." * 3_000, "a." * 900, '"}, {"ph": "X", "name": "', "]}",
    "\\",
    "=1+1", "</script>", ": inf, ", "%00", "%F0%90",
)  # fmt: skip
_CATEGORIES = (
    "cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver", "kernel",
    "gpu_memcpy", "gpu_memset", "fwdbwd", "ac2g", "Trace", "gpu_user_annotation", "", None, 7,
)  # fmt: skip
_WORDS = (
    "inf", "-inf", "nan", "-nan", "NaN", "Infinity", "1e999", "-1e999", "0x1", "01", "+1", ".5",
    "1.", "--1", "nul", "true", "[[]]", "{}", '"', '"\\ud800"', "'a'", "1" * 400, "1" * 5_000, "",
    "[" * 1_500 + "]" * 1_500, "[" * 50, '{"x":' * 1_200 + "1" + "}" * 1_200,
)  # fmt: skip
_FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "args", "bp", "s")
_ARGS = (
    "Sequence number", "Fwd thread id", "correlation", "device", "stream", "bytes", "External id",
    "blocks per SM", "Input Dims",
)  # fmt: skip


def mutated(events: list[Event], random: Random) -> bytes:
    """A trace of these events, which are changed, that is broken in a few places."""
    for _ in range(random.choice((0, 1, 1, 2, 3, 8))):
        random.choice(_OF_EVENTS)(events, random)
    text = _written(events, random)
    for _ in range(random.choice((0, 0, 0, 1, 1, 2, 5))):
        text = random.choice(_OF_TEXT)(text, random)
    return _packed(text, random)


# Events ------------------------------------------------------------------------------------------


def _some(events: list[Event], random: Random) -> list[Event]:
    """One event, a few, all of a kind, or a stretch of them."""
    if not events:
        return []
    way = random.randrange(5)
    if way == 0:
        return [random.choice(events)]
    if way == 1:
        return random.sample(events, min(len(events), random.randrange(1, 20)))
    if way == 2:
        like = random.choice(events)
        return [event for event in events if event.get("cat") == like.get("cat")]
    if way == 3:
        like = random.choice(events)
        return [event for event in events if event.get("name") == like.get("name")]
    begin = random.randrange(len(events))
    return events[begin : begin + random.randrange(1, 100)]


def _args(event: Event) -> dict[str, Any]:
    args = event.get("args")
    if not isinstance(args, dict):
        args = event["args"] = {}
    return args


Mutation = Callable[[list[Event], Random], None]


def _set(
    keys: tuple[str, ...], value: Callable[[Random], Any], *, most: int | None = None
) -> Mutation:
    """Give some events one value, by a field or an argument that is drawn."""

    def mutation(events: list[Event], random: Random) -> None:
        key, new = random.choice(keys), value(random)
        for event in _some(events, random)[:most]:
            (event if key in _FIELDS else _args(event))[key] = new

    return mutation


def _missing(keys: tuple[str, ...]) -> Mutation:
    def mutation(events: list[Event], random: Random) -> None:
        key = random.choice(keys)
        for event in _some(events, random):
            (event if key in _FIELDS else _args(event)).pop(key, None)

    return mutation


def _text_for_number(events: list[Event], random: Random) -> None:
    key = random.choice(_FIELDS)
    for event in _some(events, random):
        event[key] = str(event.get(key))


def _prefix(events: list[Event], random: Random) -> None:
    prefix = random.choice(_NAMES)
    for event in _some(events, random)[:40]:
        event["name"] = f"{prefix}{event.get('name')}"


def _thread(events: list[Event], random: Random) -> None:
    spread = random.choice((1, 1, 3, 50))
    for event in _some(events, random):
        event["tid"] = random.randrange(spread)


def _of(*values: Any) -> Callable[[Random], Any]:
    return lambda random: random.choice(values)


def _small_number(random: Random) -> int:
    return random.randrange(-1, random.choice((2, 10, 1000)))


_OTHER_TYPES = ("", "x", "12", [], [1], {}, {"x": 1}, True, None, 3.5, "\ud800", "1e5")
_number_in_field = _set(("ts", "dur", "ts", "dur", "pid", "tid", "id"), _of(*_NUMBERS))
_PLAIN: tuple[Mutation, ...] = (
    _number_in_field,
    _number_in_field,
    _set(_ARGS, _of(*_NUMBERS)),
    _set(_ARGS, _small_number),
    _set(_FIELDS, _of(*_OTHER_TYPES)),
    _text_for_number,
    _missing(_FIELDS),
    _missing(_ARGS),
    _set((*_FIELDS, *_ARGS), lambda random: f"@@{random.randrange(len(_WORDS))}@@", most=5),
    _set(("name",), _of(*_NAMES)),
    _prefix,
    _set(("cat",), _of(*_CATEGORIES)),
    _set(("ph",), _of("X", "B", "E", "i", "s", "f", "M", "", None, 1)),
    _thread,
)


def _longer(events: list[Event], random: Random) -> None:
    factor = random.choice((0, 0.5, 1.5, 3, 1000, 1e9, -1))
    for event in _some(events, random):
        if isinstance(event.get("dur"), (int, float)):
            event["dur"] *= factor


def _later(events: list[Event], random: Random) -> None:
    shift = random.choice((-1e6, -50, -1, -0.001, 0.001, 1, 50, 1e6, 1e13, 1e15))
    for event in _some(events, random):
        if isinstance(event.get("ts"), (int, float)):
            event["ts"] += shift


def _at_once(events: list[Event], random: Random) -> None:
    like = random.choice(events) if events else {}
    for event in _some(events, random):
        event["ts"] = like.get("ts")


def _like_another(events: list[Event], random: Random) -> None:
    key, like = random.choice((*_FIELDS, *_ARGS)), random.choice(events) if events else {}
    for event in _some(events, random):
        if key in _FIELDS:
            event[key] = like.get(key)
        else:
            _args(event)[key] = _args(like).get(key)


def _deleted(events: list[Event], random: Random) -> None:
    gone = {id(event) for event in _some(events, random)}
    events[:] = [event for event in events if id(event) not in gone]


def _repeated(events: list[Event], random: Random) -> None:
    again = [json.loads(json.dumps(event)) for event in _some(events, random)[:200]]
    at = random.randrange(len(events) + 1)
    events[at:at] = again * random.choice((1, 1, 2, 5))


def _moved(events: list[Event], random: Random) -> None:
    begin = random.randrange(len(events) + 1)
    some = events[begin : begin + random.randrange(1, 200)]
    del events[begin : begin + len(some)]
    at = random.randrange(len(events) + 1)
    events[at:at] = some


def _shuffled(events: list[Event], random: Random) -> None:
    random.shuffle(events)


def _arrows(events: list[Event], random: Random) -> None:
    spans = [event for event in events if event.get("ph") == "X"]
    for _ in range(random.randrange(1, 40)):
        if spans:
            one = random.choice(spans)
            events.append({
                "ph": random.choice("sf"), "cat": "fwdbwd", "name": "fwdbwd", "bp": "e",
                "id": random.choice((random.randrange(9), "x", None, 2**70, -3)),
                "pid": one.get("pid"), "tid": one.get("tid"), "ts": one.get("ts"),
            })  # fmt: skip


def _marks(events: list[Event], random: Random) -> None:
    name = random.choice([name for name in _NAMES if name])
    category = random.choice(("user_annotation", "cpu_op", "python_function"))
    spans = [event for event in events if isinstance(event.get("dur"), (int, float))]
    for _ in range(random.randrange(1, 60)):
        if spans:
            one = random.choice(spans)
            longer = one["dur"] * random.choice((0.5, 1, 1, 2, 30))
            events.append({**one, "ph": "X", "name": name, "cat": category, "dur": longer})


def _no_event(events: list[Event], random: Random) -> None:
    at = random.randrange(len(events) + 1)
    thing: Any = random.choice((1, "x", None, [], [[1]], {}, {"ph": "X"}, [{"ph": "X", "ts": 1}]))
    events.insert(at, thing if isinstance(thing, dict) else {"@@": thing})


_OF_EVENTS: tuple[Mutation, ...] = (
    *_PLAIN, _longer, _later, _at_once, _like_another, _deleted, _repeated, _moved, _shuffled,
    _arrows, _marks, _no_event,
)  # fmt: skip


# Text --------------------------------------------------------------------------------------------


def _written(events: list[Event], random: Random) -> bytes:
    indent = random.choice((*[None] * 9, 1))
    separators = random.choice((None, (",", ":"))) if indent is None else None
    items: list[Any] = [event.get("@@", event) for event in events]
    document: Any = {"schemaVersion": 1, "traceEvents": items, "traceName": "x"}
    way = random.randrange(8)
    if way == 0:
        document = items
    elif way == 1:
        document = {"a": {"traceEvent": [1]}, **document, "z": [{"ph": "X", "name": "no"}] * 3}
    elif way == 2:
        document = {**document, "backspot.lines": random.choice((1, {}, {"version": 1}, [[]] * 9))}
    text = json.dumps(
        document, indent=indent, separators=separators, sort_keys=random.random() < 0.1
    )
    for number, word in enumerate(_WORDS):
        text = text.replace(f'"@@{number}@@"', word)
    return text.encode("utf-8", "surrogatepass")


def _place(text: bytes, random: Random) -> int:
    return random.randrange(len(text) + 1)


def _flipped(text: bytes, random: Random) -> bytes:
    changed = bytearray(text)
    for _ in range(random.choice((1, 1, 5, 50))):
        if changed:
            changed[random.randrange(len(changed))] = random.randrange(256)
    return bytes(changed)


def _inserted(text: bytes, random: Random) -> bytes:
    pieces = (
        b'"',
        b"\\",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b"\0",
        b"\xff",
        b"\n",
        b" " * 5_000,
        b"null",
    )
    for _ in range(random.choice((1, 1, 4))):
        at = _place(text, random)
        text = text[:at] + random.choice(pieces) + text[at:]
    return text


def _slice_gone(text: bytes, random: Random) -> bytes:
    at = _place(text, random)
    return text[:at] + text[at + random.choice((1, 10, 300, 5_000, 100_000)) :]


def _slice_twice(text: bytes, random: Random) -> bytes:
    at, to = _place(text, random), _place(text, random)
    return text[:to] + text[at : at + random.choice((1, 10, 300, 5_000))] + text[to:]


def _slice_moved(text: bytes, random: Random) -> bytes:
    at = _place(text, random)
    some = text[at : at + random.choice((1, 10, 300, 5_000))]
    rest = text[:at] + text[at + len(some) :]
    to = _place(rest, random)
    return rest[:to] + some + rest[to:]


def _cut_short(text: bytes, random: Random) -> bytes:
    return text[: _place(text, random)]


def _number_changed(text: bytes, random: Random) -> bytes:
    key = random.choice((b'"ts":', b'"dur":', b'"pid":', b'"tid":', b'"correlation":', b'"id":'))
    parts = text.split(key)
    for _ in range(random.choice((1, 1, 5, 50))):
        if len(parts) > 1:
            at = random.randrange(1, len(parts))
            parts[at] = random.choice(_WORDS).encode() + parts[at].lstrip(b" 0123456789.-e+")
    return key.join(parts)


def _around(text: bytes, random: Random) -> bytes:
    before = random.choice((b"\xef\xbb\xbf", b" \n" * 99, b"\0", b"[", b"junk"))
    return before + text if random.random() < 0.5 else text + before


_OF_TEXT: tuple[Callable[[bytes, Random], bytes], ...] = (
    _flipped, _inserted, _slice_gone, _slice_twice, _slice_moved, _cut_short, _number_changed,
    _around,
)  # fmt: skip


def _packed(text: bytes, random: Random) -> bytes:
    way = random.randrange(12)
    if way > 4:
        return text
    at = _place(text, random)
    members = (text,) if way else (text[:at], text[at:])
    packed = b"".join(gzip.compress(some, 1, mtime=0) for some in members)
    if way == 2:
        return packed[: _place(packed, random)]
    if way == 3:
        return _flipped(packed, random)
    if way == 4:
        return packed + random.choice((b"\0" * 600, b"junk", packed[:9], packed))
    return packed
