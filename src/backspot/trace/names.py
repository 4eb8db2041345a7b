"""The names that PyTorch, Kineto, Lightning, CUDA, ROCm and NCCL write into a trace.

Every spelling that the package matches is defined here, once, with the place that writes it. Only
the operators and nodes that a single finding is about, such as ``aten::item``, are listed in that
finding's rule. A constant that is a tuple holds prefixes, for ``str.startswith`` and
``Events.named``, unless its docstring says otherwise. Names that PyTorch builds at run time have
predicates, which take one event name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence


def _begins(pattern: str) -> Callable[[str], bool]:
    """Return a predicate: whether a name begins with a pattern."""
    match = re.compile(pattern).match
    return lambda name: match(name) is not None


def _contains(pattern: str, *fragments: str) -> Callable[[str], bool]:
    """Return a predicate: whether a pattern is anywhere in a name.

    Each name that matches has one of ``fragments``: most long names have none.
    """
    search = re.compile(pattern).search
    return lambda name: (
        (not fragments or any(map(name.__contains__, fragments))) and search(name) is not None
    )


def _has(*fragments: str) -> Callable[[str], bool]:
    """Return a predicate: whether one of these is in a name; faster than a pattern in long ones."""
    return lambda name: any(map(name.__contains__, fragments))


# The file format: Chrome's trace event JSON, as Kineto's output_json.cpp writes it ---------------

TRACE_EVENTS = b'"traceEvents"'
"""The key of the list of events."""
BASE_TIME = b'"baseTimeNanoseconds"'
"""The key of the time that the times of all events are relative to."""
DEVICE_PROPERTIES = b'"deviceProperties"'
"""The key of the list of devices: for each its index, its name and more."""
COMPLETE, FLOW_START, FLOW_FINISH, INSTANT = "X", "s", "f", "i"
"""The phases (``ph``) of an event with a duration, of the two ends of an arrow, and of a moment."""
OWN_HEAD, HAS_MEMORY, HAS_SHAPES = b'"schemaVersion"', b'"profile_memory"', b'"record_shapes"'
"""Keys before the events: Kineto writes the first always, the others where it recorded them."""
SEQUENCE_NUMBER = "Sequence number"
"""Argument: autograd's sequence number of an operator or a node."""
FORWARD_THREAD = "Fwd thread id"
"""Argument: autograd's number of the thread that built a node."""
BLOCKS_PER_MULTIPROCESSOR = "blocks per SM"
"""Argument: the thread blocks of a kernel for each multiprocessor."""
PROCESS_GROUP, PROCESS_GROUP_NUMBER = "Process Group Description", "Process Group Name"
"""Arguments: what the program calls the process group of a collective, and what c10d calls it,
which is a number, and the same on all its ranks."""
SENDS_TO, RECEIVES_FROM = "Dst Rank", "Src Rank"
"""Arguments: the rank of the job that NCCL transfers to, or from."""
UNDESCRIBED = "undefined"
"""What describes a process group that the program gave no name."""
MESSAGE_ELEMENTS, ELEMENT_TYPE = "In msg nelems", "dtype"
"""Arguments: how many elements a rank puts into a collective, and of which type."""
MEMORY = "[memory]"
"""The event of an allocator that allocates or frees a block, with the arguments that follow."""
ADDRESS, BLOCK_BYTES = "Addr", "Bytes"
"""Arguments: where the block is, and its size, which is negative where it is freed."""
TOTAL_ALLOCATED, TOTAL_RESERVED = "Total Allocated", "Total Reserved"
"""Arguments: the bytes that the allocator has given out then, and those it has from the device."""
DEVICE_TYPE, DEVICE_ID = "Device Type", "Device Id"
"""Arguments: ``c10::DeviceType``, which is 0 for the CPU, and the index of the device."""
CALLED_FROM = "CallFrom"
"""Argument: the file and the line that a Python function is called from: ``train.py:31``."""
INPUT_DIMS, INPUT_TYPES = "Input Dims", "Input type"
INPUT_STRIDES, CONCRETE_INPUTS = "Input Strides", "Concrete Inputs"
"""Arguments of operators with ``record_shapes=True``: a list each, with an entry an input."""

# Categories (``cat``): Kineto's ActivityType.cpp, and what older versions and ROCm builds write --

OPERATOR_CATEGORIES = ("cpu_op", "Operator")
ANNOTATION_CATEGORIES = ("user_annotation",)
PYTHON_CATEGORIES = ("python_function",)
RUNTIME_CATEGORIES = (
    "cuda_runtime",
    "cuda_driver",
    "hip_runtime",
    "hip_driver",
    "xpu_runtime",
    "xpu_driver",
    "privateuse1_runtime",
    "privateuse1_driver",
    "runtime",
    "Runtime",
)
KERNEL_CATEGORIES = ("kernel", "Kernel")
MEMCPY_CATEGORIES = ("gpu_memcpy", "Memcpy")
MEMSET_CATEGORIES = ("gpu_memset", "Memset")
OVERHEADS = frozenset(
    (
        "Activity Buffer Request",
        "Buffer Flush",
        "Command Buffer Full",
        "Driver Compiler",
        "Instrumentation",
        "Lazy Function Loading",
        "Resource",
        "Runtime Triggered Module Loading",
        "UVM Activity Init",
        "Unknown",
        "Unrecognized",
    )
)
"""What CUPTI calls its own work, which is on threads that do not exist."""
INSTANTS = "cpu_instant_event"
"""The category of what has no duration: among others, of what the allocators report."""
FORWARD_BACKWARD = "fwdbwd"
"""The category of the arrows from a forward operator to its backward node."""
OTHER_CATEGORIES = frozenset(
    {
        "",
        "Trace",
        "collective_comm",
        INSTANTS,
        "cuda_event",
        "cuda_profiler_range",
        "cuda_sync",
        "external_correlation",
        "gpu_user_annotation",
        "overhead",
    }
)
"""Whole category names that Kineto writes beside the work of host and devices."""

# Python frames, of ``with_stack=True``: torch/csrc/autograd/profiler_python.cpp ------------------

MODULE_CALL = "nn.Module: "
"""The call of a module, followed by its class name and the number of the instance."""
is_python_frame = _begins(r".*\.py\(\d+\): |<built-in ")
"""Whether this is another Python call: ``file.py(12): step``, ``<built-in method …>``."""


# Marks of Backspot's live half beside its labels --------------------------------------------------

COLLECTION = "garbage collection"
"""A full collection of Python's garbage collector."""
UNREAD = "gradients that nobody reads: "
"""In the backward of a Function that returns such gradients: see ``unread_mark``."""
WAITED_AT = "waited for the device at "
"""Behind a wait of the host: the line that waits, ``train.py:31``."""
BATCH = "batch of loader "
"""Behind the fetch of a batch that workers load: ``1 (2 workers, 4 ahead): ready`` or ``waited
38.211 ms``. Up to so many batches are kept ready ahead."""
OPTIMIZER_GROUPS = "groups of the optimizer: "
"""In the step of an optimizer: see ``groups_mark``."""
OPTIMIZER_FORMS = "optimizer with the arguments of "
"""In the step of an optimizer that is none of ``torch.optim``'s own: whose arguments ``fused`` and
``foreach`` it takes, such as ``AdamW``; ``NO_FORMS`` if it does not take them."""
NO_FORMS = "no class"

BACKWARD_HOOK = "full backward hook "
"""At the start of a recording, for each of a module's: see ``backward_hook_mark``."""

_BACKWARD_HOOK = re.compile(rf"{BACKWARD_HOOK}(?P<hook>.+?) on (?P<path>.*)", re.DOTALL)
_UNREAD = re.compile(rf"{UNREAD}(?P<unread>\d+) of (?P<all>\d+)")
_GROUPS = re.compile(rf"{OPTIMIZER_GROUPS}(?P<groups>\d+) for (?P<settings>\d+)")
_BATCH = re.compile(
    rf"{BATCH}(?P<loader>\d+) \((?P<workers>\d+) workers?, (?P<queue>\d+) ahead\): "
    r"(ready|waited (?P<waited>\d+\.\d+) ms)"
)


def batch_mark(loader: int, workers: int, queue: int, waited_ns: int) -> str:
    """Return the mark behind a fetch, with what was waited for in nanoseconds; 0 if ready."""
    fetch = f"{BATCH}{loader} ({workers} {'worker' if workers == 1 else 'workers'}, {queue} ahead)"
    return f"{fetch}: waited {waited_ns / 1e6:.3f} ms" if waited_ns else f"{fetch}: ready"


def read_batch_mark(name: str) -> tuple[int, int, int, int] | None:
    """Return what ``batch_mark`` was given, in microseconds' precision; ``None`` if malformed."""
    match = _BATCH.fullmatch(name)
    if match is None:
        return None
    waited = max(1, round(float(match["waited"]) * 1e6)) if match["waited"] else 0
    return int(match["loader"]), int(match["workers"]), int(match["queue"]), waited


def backward_hook_mark(hook: str, path: str) -> str:
    """Return the mark for a module's full backward hook, with the hook's name."""
    return f"{BACKWARD_HOOK}{hook} on {path}"


def read_backward_hook_mark(name: str) -> tuple[str, str] | None:
    """Return what ``backward_hook_mark`` was given, ``None`` if malformed."""
    match = _BACKWARD_HOOK.fullmatch(name)
    return None if match is None else (match["hook"], match["path"])


def unread_mark(unread: int, total: int) -> str:
    """Return the mark in a backward that returns some gradients, of all, that nobody reads."""
    return f"{UNREAD}{unread} of {total}"


def read_unread_mark(name: str) -> tuple[int, int] | None:
    """Return what ``unread_mark`` was given, ``None`` if malformed."""
    match = _UNREAD.fullmatch(name)
    return None if match is None else (int(match["unread"]), int(match["all"]))


def groups_mark(groups: int, settings: int) -> str:
    """Return the mark in the step of an optimizer, with its groups and how many settings differ."""
    return f"{OPTIMIZER_GROUPS}{groups} for {settings}"


def read_groups_mark(name: str) -> tuple[int, int] | None:
    """Return what ``groups_mark`` was given, ``None`` if malformed."""
    match = _GROUPS.fullmatch(name)
    return None if match is None else (int(match["groups"]), int(match["settings"]))


# Annotations: what calls ``record_function`` -----------------------------------------------------

PROFILER_STEP = "ProfilerStep#"
"""A step of the training loop: ``torch.profiler.profile.step``."""
OPTIMIZER_STEP = "Optimizer.step#"
"""``torch.optim.Optimizer.profile_hook_step``, followed by the class."""
OPTIMIZER_FILES = "torch/optim/"
"""Where PyTorch's optimizers are, and what wraps each step of any optimizer."""
ZERO_GRAD = "Optimizer.zero_grad#"
"""``torch.optim.Optimizer.zero_grad``, followed by the class."""
OPTIMIZER = ("Optimizer.", "Optimizer#")
"""All marks of optimizers, in both spellings."""
NEXT_BATCH = "enumerate(DataLoader)#"
"""``torch.utils.data.DataLoader``'s iterator fetching a batch, followed by the class."""
is_fetch_from_workers = _begins(rf"{re.escape(NEXT_BATCH)}_\w*MultiProcessing\w*Iter")
"""Whether this is the same, where worker processes load the batches."""
DDP_FORWARD = "DistributedDataParallel.forward"
"""``torch.nn.parallel.DistributedDataParallel.forward``."""
DDP_SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"
COMPILED_REGION = "Torch-Compiled Region: "
"""``torch._dynamo``, around each compiled graph."""
COMPILING = ("_compile.compile_inner ", "_compile.<locals>.compile_inner ")
"""``torch._dynamo.convert_frame``, around each compilation."""
RESUMED = "torch_dynamo_resume_in_"
"""``torch._dynamo.resume_execution``: the function that has the code behind a graph break."""
MODULE_FUNCTIONS = ("forward", "inner", "__call__", "_call_impl", "_wrapped_call_impl")
"""Functions that Dynamo compiles where a module is compiled: ``torch._dynamo.external_utils``."""
COMPILED_GRAPH = "## Call CompiledFxGraph "
"""``torch._inductor``, around each call of a compiled graph, followed by the graph's key."""
LIGHTNING_MODULE = re.compile(r"\[pl\]\[module\](?P<class_name>[^:]*): (?P<path>.*)", re.DOTALL)
"""The call of a module: ``lightning.pytorch.profilers.PyTorchProfiler``."""
HOST_MARKS = ("autograd::", "DataLoader", "enumerate(", "Optimizer", "ProfilerStep")
"""What PyTorch wraps around the work of others; some versions write these as operators."""
# The actions of Lightning's trainer, with the class of whoever runs them in between.
_ACTION = r"\[pl\]\[profile\].*"
_GATHER_MARK = re.compile(r"FSDP::all_gather(?: \((.+)\))?$")
_SHARDING_HOOK = re.compile(r"FSDP::((?:pre|post)_(?:forward|backward)\w*)(?: \((.+)\))?$")
is_fetch_mark = _begins(rf"enumerate\(DataLoader\)|{_ACTION}(dataloader_next|val_next)$")
"""Whether PyTorch or Lightning marks with this that a batch is fetched."""
is_copy_mark = _begins(rf"{_ACTION}batch_to_device$")
"""Whether Lightning marks with this that a batch is copied to the device."""
# "FSDP::": all that ``torch.distributed.fsdp.fully_shard`` does.
is_forward_mark = _begins(rf"DistributedDataParallel\.forward|FSDP::|{_ACTION}training_step$")
"""Whether PyTorch or Lightning marks a model's forward with this."""
# FullyShardedDataParallel.forward is around the wrapped module's forward, too.
is_sharding_mark = _begins(r"FSDP::|FullyShardedDataParallel\._")
"""Whether FSDP, in either version, marks its own work with this."""


def gathered_module(name: str) -> str | None:
    """Return the module whose parameters FSDP2 gathers under this mark; ``None`` for other marks.

    It is ``""`` for the root, and where the mark names no module.
    """
    match = _GATHER_MARK.match(name)
    return None if match is None else match[1] or ""


BEFORE_FORWARD, AFTER_FORWARD = "pre_forward", "post_forward"
"""FSDP2's hooks around the forward of a module whose parameters it shards together."""


def sharding_hook(name: str) -> tuple[str, str] | None:
    """Return which of FSDP2's hooks this mark is around, and of which module; else ``None``.

    The module is ``""`` for the root. The hook is ``BEFORE_FORWARD``, ``AFTER_FORWARD``, or one of
    the backward.
    """
    match = _SHARDING_HOOK.match(name)
    return None if match is None else (match[1], match[2] or "")


is_clipping_mark = _begins(rf"{_ACTION}configure_gradient_clipping$")
"""Whether Lightning marks with this that gradients are clipped."""
is_zero_grad_mark = _begins(rf"Optimizer\.zero_grad#|{_ACTION}zero_grad$")
"""Whether PyTorch or Lightning marks with this that gradients are set to zero or dropped."""
is_optimizer_mark = _begins(rf"Optimizer[.#]|{_ACTION}zero_grad$")
"""Whether PyTorch or Lightning marks the work of an optimizer with this, ``zero_grad`` included."""
SAVING = "torch.save"
"""The live half, around each call of this function."""
is_saving_mark = _begins(rf"{SAVING}$|{_ACTION}save_checkpoint$")
"""Whether the live half or Lightning marks with this that a checkpoint is saved."""
is_trainer_mark = _begins(_ACTION)
"""Whether Lightning's trainer marks its own work, a callback or a hook with this."""


# Generated code: torch/_inductor -----------------------------------------------------------------

_GRAPH_NUMBER = re.compile(r"graph_\d+_")
_EXTERN_KERNEL = re.compile(r"(?:\w+\.)*extern_kernels\.(\w+)$")
_OVERLOAD = re.compile(r"(?:torch\.ops\.)?(\w+)\.(\w+)(?:\.\w+)?$")
_RENAMED = {"bias_addmm": "addmm"}


def compiled_graph_key(name: str) -> str:
    """Return the key in the name of a compiled graph's call."""
    return name.removeprefix(COMPILED_GRAPH).removesuffix(" ##")


_RESUMED = re.compile(rf"(?:{RESUMED})+(.*?)(?:_at_\d+)*$")


def compiled_function(name: str) -> str:
    """Return the function that Dynamo compiled, or of which it compiled what is behind a break."""
    match = _RESUMED.match(name)
    return match[1] if match else name


is_generated_cpp = _begins(r"cpp_")
"""Whether a launch site calls generated C++ code: ``cpp_fused_add_0``."""


def is_triton(name: str) -> bool:
    """Whether a launch site calls a generated Triton kernel, which has the same name."""
    return name.startswith("triton_")


is_generated_loop = _begins(r"(triton_(poi|red|per|for)|(graph_\d+_)?cpp)_fused_")
"""Whether a generated kernel does pointwise work and reductions: ``triton_poi_fused_add_3``.

Kernels from templates multiply matrices, as ``triton_tem_fused_mm_0``.
"""


def is_library_call(name: str) -> bool:
    """Whether a launch site calls an operator that is not generated: ``extern_kernels.mm``."""
    return _EXTERN_KERNEL.match(name) is not None or _OVERLOAD.match(name) is not None


def is_launch_of(site: str, name: str) -> bool:
    """Whether an event is a launch at this site of generated code.

    ``extern_kernels.mm`` is ``aten::mm``, ``torch.ops.aten.sort.stable`` is ``aten::sort``. An
    operator of higher order shows only the one that it calls (checkpointing's
    ``graphsafe_run_with_rng_state`` an attention with dropout). A generated kernel has its own
    name, after ``graph_0_`` if it is C++.
    """
    if match := _EXTERN_KERNEL.match(site):
        return name == f"{ATEN}{_RENAMED.get(match[1], match[1])}"
    if match := _OVERLOAD.match(site):
        if match[1] == "higher_order":
            return name.startswith(ATEN)
        return name == f"{match[1]}::{match[2]}"
    return site == (_GRAPH_NUMBER.sub("", name) if is_generated_cpp(site) else name)


# Autograd: torch/csrc/autograd -------------------------------------------------------------------

EVALUATE_FUNCTION = "autograd::engine::evaluate_function: "
"""The engine executing a node, followed by the node's name: ``engine.cpp``."""
AUTOGRAD_NAMESPACE = "torch::autograd::"
"""Before the name of a node that C++ wrote by hand, demangled: ``Node::name``."""
NODE_NAMESPACES = ("autograd::", AUTOGRAD_NAMESPACE)
"""Before the names of the engine's work and of nodes."""
ACCUMULATE_GRAD = "AccumulateGrad"
"""The node that adds a gradient to its parameter: ``functions/accumulate_grad.h``."""
BACKWARD = "Backward"
"""In the names of all nodes that ``derivatives.yaml`` generates, and of Python's Functions."""
CPP_FUNCTION = "CppFunction"
"""Python's class of a node that C++ defines without one: ``python_cpp_function.cpp``."""
BACKWARD_HOOK_FUNCTION = "BackwardHookFunction"
"""What ``nn.Module``'s full backward hooks wrap inputs and outputs in: ``utils/hooks.py``."""
CHECKPOINT_SAVES = "_NoopSaveInputs"
"""What keeps the inputs of ``torch.utils.checkpoint`` with ``use_reentrant=False``, in the forward.
"""
CHECKPOINT_FUNCTION = "CheckpointFunction"
"""The node of ``torch.utils.checkpoint`` with ``use_reentrant=True``."""
DIFFERENTIABLE_GRAPH = "DifferentiableGraph"
"""Part of the name of a node of TorchScript: ``graph_executor.cpp``."""
COMPILED_FUNCTION = "CompiledFunction"
"""The node of a compiled region: ``torch/_functorch``."""


def is_accumulate_grad(name: str) -> bool:
    """Whether this is the node that adds a gradient to its parameter."""
    return name.endswith(ACCUMULATE_GRAD)


is_node = _contains(r"\w+Backward\d*\Z", "Backward")
"""Whether a node has a name as PyTorch gives it: ``MulBackward0``, ``MyFunctionBackward``."""
is_generated_node = _contains(r"Backward\d+\Z", "Backward")
"""Whether ``derivatives.yaml`` generated this node: ``MulBackward0``."""


def is_custom_function(name: str) -> bool:
    """Whether a node is that of a program's own ``torch.autograd.Function``."""
    of_torch = (COMPILED_FUNCTION, CHECKPOINT_FUNCTION, BACKWARD_HOOK_FUNCTION)
    return is_node(name) and name.endswith(BACKWARD) and not name.startswith(of_torch)


is_extreme_of_all = _begins(r"(Max|Min)Backward1\Z")
"""Whether this is the node of ``max()`` or ``min()`` of a whole tensor; with ``dim`` it is the
other one of the name."""


is_view_node = _begins(r"(.*::)?(CopySlices|CopyBackwards|AsStridedBackward\d*)\Z")
"""Whether autograd made this node for a view or a copy, beside the operator's own node."""


def is_of_all(node: str) -> bool:
    """Whether a node is that of a sum or a mean of all elements, and not over some dimensions."""
    return short_node_name(node) in ("SumBackward0", "MeanBackward0")


def short_node_name(name: str) -> str:
    """Return the name of a node without autograd's C++ namespace."""
    return name.removeprefix(AUTOGRAD_NAMESPACE)


def is_operator(name: str) -> bool:
    """Whether a program calls this: ``aten::nonzero``, and no node of autograd."""
    return "::" in name and not name.startswith(NODE_NAMESPACES)


# Collectives: torch/csrc/distributed/c10d ---------------------------------------------------------

LAUNCHES_OF_COLLECTIVES = ("c10d::", "_c10d_functional::", "nccl:")
"""What surrounds the start of a collective, and names it."""
WAITS_FOR_COLLECTIVES = ("_c10d_functional::wait_tensor",)
"""Where the host waits for a collective, or a queue of the device does."""
COLLECTIVE_CALL = "record_param_comms"
"""The operator around the launch of any collective; its arguments describe the collective."""
HOST_COLLECTIVES = ("gloo:", "mpi:")
"""A collective that threads of the host execute, from its start until all ranks have taken part."""
SEND, RECEIVE = "c10d::send", "c10d::recv_"
"""The operators of transfers; their third input is the other rank's place in the process group."""
POINT_TO_POINT = "send_recv"
"""The transfer between two ranks, which is no collective."""
ALL_TO_ALL = "all_to_all"
"""The collective in which each rank sends a part to each other."""
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "alltoall": ALL_TO_ALL,
    "broadcast": "broadcast",
    "reduce": "reduce",
    "scatter": "scatter",
    "gather": "gather",
    "barrier": "barrier",
    "send": POINT_TO_POINT,
    "recv": POINT_TO_POINT,
}
_ITEM_SIZES = {
    1: "Byte Char Bool QInt8 QUInt8 Float8_e5m2 Float8_e4m3fn Float8_e5m2fnuz Float8_e4m3fnuz",
    2: "Half BFloat16 Short UInt16",
    4: "Float Int UInt32",
    8: "Double Long UInt64 ComplexFloat",
    16: "ComplexDouble",
}
_BYTES_OF = {name: size for size, names in _ITEM_SIZES.items() for name in names.split()}


def item_size(dtype: str) -> int:
    """Return the bytes of one element of a type as c10 calls it, 0 if the type is unknown."""
    return _BYTES_OF.get(dtype, 0)


def process_group(description: str, number: str) -> str:
    """Return what a process group is called: two without a description stay apart."""
    return f"group {number}" if description == UNDESCRIBED and number else description


def collective_in(name: str) -> str:
    """Return the collective that a kernel, operator or annotation names, ``""`` for none."""
    letters = name.lower().replace("_", "")
    return next(
        (
            collective
            for letters_in_name, collective in _COLLECTIVES.items()
            if letters_in_name in letters
        ),
        "",
    )


# Operators: native_functions.yaml ----------------------------------------------------------------

ATEN = "aten::"
"""The namespace of PyTorch's own operators."""
AFTER_REDUCTION = frozenset(
    f"{ATEN}{name}"
    for name in ("slice", "view", "sum", "prod", "any", "amin", "amax", "min", "max", "to", "copy_")
)
"""What generated code calls after a kernel that reduces in two directions, to finish the second
one: ``_codegen_mix_order_reduction`` in ``torch/_inductor/codegen/simd.py``."""
ATTENTION = (
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product",
    "aten::_flash_attention",
    "aten::_efficient_attention",
    "flash_attn::",
)
"""Operators of attention, and their backward."""
FOREACH = "aten::_foreach_"
"""Operators on all tensors of a list."""
SYNC_BATCH_NORM = "SyncBatchNorm"
"""The class of the module that exchanges the statistics of its batches: ``torch.nn``."""
is_draw = _begins(
    r"aten::(multinomial|normal|bernoulli|exponential_|binomial|poisson|_standard_gamma"
    r"|_sample_dirichlet)$"
)
"""Whether this operator draws values from a distribution with given parameters.

``torch.distributions`` draws with these. Noise that depends on nothing is none: ``aten::randn``.
"""
is_best = _begins(r"aten::(argmax|topk)$")
"""Whether this operator finds the largest values."""
is_concatenation = _begins(r"aten::cat$")
"""Whether this operator appends a tensor to another one."""
is_repeat = _begins(r"aten::(repeat|tile|repeat_interleave)$")
"""Whether this operator copies a tensor several times."""
is_gradient_operator = _begins(r"aten::(_foreach_|_fused_(adam|sgd|adagrad)|_amp_|zero_$)")
"""Whether this operator clips, unscales, zeroes or applies all gradients at once."""
is_scaling = _begins(r"aten::_amp_")
"""Whether this operator unscales all gradients at once, or updates the scale."""
is_zeroing = _begins(r"aten::(_foreach_)?zero_$")
"""Whether this operator sets a tensor, or all of a list, to zero."""
is_averaging = _begins(r"aten::(_foreach_)?(lerp|mul|add|sub|copy)_$")
"""Whether this operator changes a tensor in place, as the average of weights needs."""
is_reading = _begins(r"aten::(item|_local_scalar_dense|is_nonzero)$")
"""Whether this operator returns the value of a tensor to Python."""
is_norm = _begins(r"aten::(linalg_vector_)?norm$")
"""Whether this operator computes a norm, as clipping does for each gradient."""
NORMS_AT_ONCE = "aten::_foreach_norm"
"""The norms of all gradients, which alone change none of them."""
is_rescaling = _begins(r"aten::(_foreach_)?(mul|div|clamp|clamp_min|clamp_max|copy)_$|aten::mul$")
"""Whether this operator can make gradients smaller, as clipping does by their norm."""
is_pin_memory = _begins(r"aten::_?pin_memory$")
"""Whether this operator copies a tensor into pinned memory."""


# Calls of the CUDA and HIP runtimes and drivers --------------------------------------------------

KERNEL_LAUNCHES = ("cudaLaunch", "cuLaunch", "hipLaunch", "hipModuleLaunch", "hipExtLaunch")
GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch")
"""The replay of a captured CUDA or HIP graph."""
CODE_LOADS = ("cuModuleLoad", "cuLibraryLoad", "hipModuleLoad", "cudaModuleLoad")
"""Device code being loaded, which happens when a kernel is first wanted."""
STREAM_WAITS = ("cudaStreamWaitEvent", "cuStreamWaitEvent", "hipStreamWaitEvent")
"""One queue of a device waiting for an event of another."""
is_runtime_call = _begins(r"(cuda|hip|cu[A-Z])")
"""Whether this is a call of the CUDA or HIP runtime or driver."""
is_cuda_work = _contains(
    r"Mem(cpy|set) |at::(native|cuda)|^void |gemm|cudnn|cutlass|nccl|Cijk_|triton_"
)
"""Whether device work has a name as on GPUs of NVIDIA and AMD, which PyTorch calls ``cuda``."""
is_of_apples_gpu = _begins(r"aten::_?mps_")
"""Whether this operator runs on Apple's GPUs: ``aten::_mps_convolution``."""
is_synchronization = _begins(
    r"(cuda|hip)(Stream|Device|Event)Synchronize|(cuda|hip)Memcpy(2D|3D)?$|cu(Stream|Ctx|Event)Sync"
    r"|(cuda|hip)Free$"
)
"""Whether this call returns only when the device has done its work.

``cudaFree`` does, too: "API synchronization behavior" of CUDA, ``hipFree`` of HIP.
"""


def is_device_synchronization(name: str) -> bool:
    """Whether this call waits for all of a device's queues: ``cudaDeviceSynchronize``."""
    return "DeviceSync" in name


def is_event_synchronization(name: str) -> bool:
    """Whether this call returns when a device has reached an event: ``cudaEventSynchronize``."""
    return "EventSync" in name


is_allocation = _begins(
    r"(cuda|hip)(Malloc(?!\w*Async)|HostAlloc|HostMalloc|HostRegister|ExtMalloc|MemCreate|MemMap)"
    r"|cuMem(Alloc(?!\w*Async)|HostAlloc|HostRegister|Create|Map)"
)
"""Whether an allocator asks the driver for memory by this call: ``cudaMalloc``."""
is_release = _begins(
    r"(cuda|hip)(Free(?!\w*Async)|HostFree|HostUnregister|MemRelease|MemUnmap)"
    r"|cuMem(Free(?!\w*Async)|HostUnregister|Release|Unmap)"
)
"""Whether an allocator gives memory back to the driver by this call: ``cudaFree``."""
is_of_pinned_memory = _begins(r"(cuda|hip|cuMem)(\w*Host)")
"""Whether a call that allocates or releases is about memory of the host: ``cudaHostAlloc``."""
is_launch = _begins(r"(cuda|hip|cu)(\w*Launch|Mem(cpy|set))")
"""Whether this call has a device do something: ``cudaLaunchKernel``, ``cudaMemcpyAsync``."""


# Copies and memsets on the device: Kineto's CuptiActivity.cpp and RoctracerActivity.cpp ----------

MEMCPY = "Memcpy"
MEMSET = "Memset"
TO_DEVICE = ("Memcpy HtoD", "CopyHostToDevice")
"""From host to device, as CUDA and as ROCm call it."""
CUDA_TO_DEVICE = "Memcpy HtoD"
TO_HOST = "Memcpy DtoH"
PAGEABLE = "Pageable"
"""Part of the name of a copy that blocks its caller: ``Memcpy HtoD (Pageable -> Device)``."""
PAGEABLE_TO_DEVICE = "Memcpy HtoD (Pageable"
is_copy_from_device = _begins(r"Memcpy (DtoH|PtoP|Peer)|Memcpy DtoD \(Device -> Device \d")
"""Whether a copy leaves its device: to the host or to another device."""


# Kernels -----------------------------------------------------------------------------------------

_COMMUNICATION = ("nccl", "rccl", "mscclpp", "nvshmem", "oneccl")
FILL_FUNCTOR = "FillFunctor"
"""Part of the name of the kernel that fills a tensor: ATen's ``FillKernel.cu``."""
INDEXING_BACKWARD = "indexing_backward_kernel"
"""Part of the name of the kernels that add gradients into rows: ATen's ``Indexing.cu``."""
ROWS_IN_PARTS, PARTS_OF_ROWS = "compute_grad_weight", "sum_and_scatter"
"""Parts of the names of the kernels that add gradients into rows of an embedding, each gradient
once, and then the parts of each row in turn: ATen's ``EmbeddingBackwardKernel.cu``."""


DEPTHWISE_2D, DEPTHWISE_3D = "conv_depthwise2d", "conv_depthwise3d"
"""Parts of the names of the kernels of depthwise convolutions: ATen's ``DepthwiseConv*d.cu``."""
_is_half = _has("Half", "BFloat16")
_adds_atomically = _contains(
    r"ReduceAdd|(upsample\w*backward|grid_sampler\w*backward|indexFunc).*(Half|BFloat16)",
    *("ReduceAdd", "backward", "indexFunc"),
)


def is_half_atomic(name: str) -> bool:
    """Whether a kernel of ATen adds atomically in half precision."""
    return _is_half(name) and _adds_atomically(name)


is_vector_product = _contains(
    r"\b(gemv|gemmk1|gemmSN|dot_kernel)", "gemv", "gemmk1", "gemmSN", "dot_kernel"
)
"""Whether a kernel of cuBLAS multiplies by a vector, or by a matrix of a few rows."""
is_pairwise_distance = _contains(r"\b[cp]dist_(backward_)?kernel", "dist_")
"""Whether a kernel computes the distances of pairs of points: ATen's ``DistanceKernel.cu``."""


def short_kernel_name(name: str) -> str:
    """Return what a person calls a kernel: without namespaces, template and other arguments.

    ``void at::(anonymous namespace)::spin_kernel<4>(long)`` is ``spin_kernel``. A short name keeps
    the namespace before it: ``gemvx::kernel``. The end of a name may be missing. A copy or a memset
    keeps its name: ``Memcpy DtoH (Device -> Pageable)``.
    """
    if name.startswith((f"{MEMCPY} ", f"{MEMSET} ")):
        return name
    depth, kept = 0, []
    for character in name.replace(_ANONYMOUS, ""):
        depth += character == "<"
        if not depth:
            kept.append(character)
        depth -= character == ">" and depth > 0
    words = "".join(kept).partition("(")[0].split()
    path = words[-1].split("::") if words else [""]
    return (path[-1] if len(path[-1]) > _FEW_LETTERS else "::".join(path[-2:])) or name


_FEW_LETTERS = 7
"""A last name of so few letters, such as ``gemm`` or ``Kernel2``, says little by itself."""
_WORD = re.compile(r"[^\s<>(){},:&*#]+")
_ANONYMOUS = "(anonymous namespace)::"


def short_kernel_names(names: Iterable[str]) -> dict[str, str]:
    """Return what a person calls these kernels, each by its name: no two are called alike.

    Those of one template are called by the first argument that is theirs alone:
    ``Kernel2<…cutlass_80_simt_sgemm…>``; those that have none keep their whole names.
    """
    kernels = tuple(dict.fromkeys(names))
    alike: dict[str, list[str]] = {}
    for name in kernels:
        alike.setdefault(short_kernel_name(name), []).append(name)
    return {
        name: short if len(of_short) == 1 else _told_apart(short, name, of_short)
        for short, of_short in alike.items()
        for name in of_short
    }


def _told_apart(short: str, name: str, alike: Sequence[str]) -> str:
    head, _, arguments = name.replace(_ANONYMOUS, "").partition("<")
    own = [] if "(" in head else _WORD.findall(arguments.rpartition(">")[0] or arguments)
    others = {word for other in alike if other != name for word in _WORD.findall(other)}
    apart = next((word for word in own if word not in others), "")
    return f"{short}<…{apart}…>" if apart else name


def is_communication(name: str) -> bool:
    """Whether a kernel communicates between ranks: NCCL, RCCL, MSCCL++, NVSHMEM or oneCCL."""
    return any(map(name.lower().__contains__, _COMMUNICATION))


def is_sort(name: str) -> bool:
    """Whether a kernel sorts: CUB's, Thrust's and ATen's are all named so."""
    return "sort" in name.lower()


is_fused_optimizer = _has("multi_tensor_apply", "fused", "Fused", "triton_", "_foreach")
"""Whether a kernel or operator updates many parameters: ATen's foreach and fused, Triton's."""
is_zero_fill = _has("FillFunctor", "Memset", "zero", "Zero", "multi_tensor_apply")
"""Whether device work sets memory to zero: ATen's kernels, and memsets."""
is_layout_conversion = _has(
    "nchwToNhwc", "nhwcToNchw", "nchw2nhwc", "nhwc2nchw", "convertTensor_kernel"
)
"""Whether a kernel of cuDNN converts between channels-first and channels-last."""
_WITHOUT_TENSOR_CORES = re.compile(
    r"_ffma|simt_[sd]?gemm|\b(ampere|volta|maxwell|turing|hopper)_[sd]gemm|gemmSN\w*<(float|double)"
    r"|(dgrad|wgrad)\w*engine<(float|double),|implicit_convolve_[sd]gemm<(float|double)|[sd]gemm_largek"
    r"|winograd\w*<float|cudnn\w*_[sd]gemm_|Cijk_\w*_SB_(?!\w*(XF32|TF32|_MI\d))"
)
_IN_PRODUCTS = ("gemm", "_ffma", "engine<", "winograd", "Cijk_")
"""One of these is in each name that the expression before finds."""


def is_without_tensor_cores(name: str) -> bool:
    """Whether a matrix product or convolution of cuBLAS, cuDNN or Tensile uses plain arithmetic."""
    # The search is slow, and names of kernels are long.
    possible = any(fragment in name for fragment in _IN_PRODUCTS)
    return possible and _WITHOUT_TENSOR_CORES.search(name) is not None


is_tf32 = _has("tf32", "xf32", "TF32", "XF32", "s1688", "s161616")
"""Whether a product or convolution of fp32 runs on tensor cores, rounded to tf32 or xf32."""
is_double = _has("dgemm", "<double")
"""Whether a kernel of cuBLAS, cuDNN or Tensile computes in fp64."""
