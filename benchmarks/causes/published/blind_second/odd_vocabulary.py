"""A vocabulary of 50,257 words, for which tensor cores have no good shape."""

from benchmarks.causes.published.parts import Models, Published, Step, half, learning, sized
from benchmarks.models import Context, Gpt, made

CASE = Published(
    source="RobertRiachi/nanoPALM#6",
    cause=("multiple of", "aligned", "alignment", "odd size", "padded", "pad ", "tensor core"),
    place=("lm_head", "wte"),
    fix="Pad the vocabulary to a multiple of 64",
    gain="1.19 to 1.24 steps a second (RTX 3090); 35 ms a step in tensorflow/models#7407",
    device="cuda",
    same=False,  # there are more words to choose from
)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    words = sized(context, 50_257, 1021, 61)
    padded = (words + 63) // 64 * 64 if fixed else words
    width, depth = sized(context, 768, 64, 32), sized(context, 6, 2, 1)
    length, batch = sized(context, 1024, 64, 8), sized(context, 16, 2, 2)
    model = made(context, lambda: Gpt(width, depth, length, padded)).to(half(context))
    tokens, follow = (context.randint(words, batch, length) for _ in range(2))
    return learning(model, tokens, follow)
