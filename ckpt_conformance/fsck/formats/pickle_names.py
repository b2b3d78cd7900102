"""Which names a pickle may ask for: those that checkpoints hold, and those that run code.

The names that pass in silence are listed one by one: what torch loads with `weights_only=True`,
what numpy 1 and 2 rebuild arrays with, the parts of a DTensor and a ShardedTensor. Others are told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats.dtypes import ITEM_SIZE
from ckpt_conformance.fsck.source.findings import Kind
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from ckpt_conformance.fsck.formats.pickles import Name

_TYPES = (
    *("BFloat16", "Bool", "Byte", "Char", "ComplexDouble", "ComplexFloat", "Double", "Float"),
    *("Half", "Int", "Long", "Short", "QInt32", "QInt8", "QUInt2x4", "QUInt4x2", "QUInt8"),
)
_BITS = (
    *("bits1x8", "bits2x4", "bits4x2", "quint2x4", "quint4x2"),
    *(f"{sign}{bits}" for sign in ("int", "uint") for bits in range(1, 8)),
)
_OF_CLASSES = " ".join(f"{one}Storage {one}Tensor" for one in _TYPES)
_PLAIN = "set frozenset complex bytearray bytes int float slice"
_ARRAYS, _FRAMES = "_reconstruct scalar", "_frombuffer"
_PLACEMENTS = "Shard Replicate Partial _Partial _StridedShard"
_SPECS = "DTensorSpec TensorMeta ShardOrderEntry"
_SHARDED = "torch.distributed._shard"
_CLASSES = {
    "builtins": _PLAIN,
    "__builtin__": _PLAIN,
    "_codecs": "encode",
    "collections": "OrderedDict Counter defaultdict deque",
    "torch": f"Size Tensor device {_OF_CLASSES} {' '.join((*ITEM_SIZE, *_BITS))} per_tensor_affine "
    "per_tensor_symmetric per_channel_affine per_channel_symmetric "
    "per_channel_affine_float_qparams",
    **dict.fromkeys(("torch.cuda", "torch.sparse", "torch.cuda.sparse"), _OF_CLASSES),
    "torch._dynamo.decorators": "_DimRange",  # a NestedTensor's
    "torch._tensor": "_rebuild_from_type_v2",
    "torch._utils": "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter "
    "_rebuild_parameter_with_state _rebuild_sparse_tensor _rebuild_qtensor _rebuild_nested_tensor "
    "_rebuild_meta_tensor_no_storage _rebuild_wrapper_subclass "
    "_rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor",
    "torch.nested._internal.nested_tensor": "NestedTensor _rebuild_njt",
    "torch.nn.parameter": "Parameter Buffer",
    "torch.serialization": "_get_layout",
    "torch.storage": "TypedStorage UntypedStorage",
    "numpy": "dtype ndarray",
    **dict.fromkeys(("numpy.core.multiarray", "numpy._core.multiarray"), _ARRAYS),
    **dict.fromkeys(("numpy.core.numeric", "numpy._core.numeric"), _FRAMES),
    "torch.distributed._mesh_layout": "_MeshLayout _FlatLayout",
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed.remote_device": "_remote_device",
    **dict.fromkeys(("torch.distributed.tensor", "torch.distributed._tensor.api"), "DTensor"),
    "torch.distributed.tensor.placement_types": _PLACEMENTS,
    "torch.distributed._tensor.placement_types": f"{_PLACEMENTS} {_SPECS}",
    "torch.distributed.tensor._dtensor_spec": _SPECS,
    "torch.distributed._tensor._dtensor_spec": _SPECS,
    f"{_SHARDED}.metadata": "ShardMetadata",
    f"{_SHARDED}.sharded_tensor.api": "ShardedTensor",
    f"{_SHARDED}.sharded_tensor.metadata": "MEM_FORMAT_ENCODING ShardedTensorMetadata "
    "TensorProperties",
    f"{_SHARDED}.sharded_tensor.shard": "Shard",
    f"{_SHARDED}.sharding_spec.api": "EnumerableShardingSpec",
    f"{_SHARDED}.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
}
_KNOWN = {(module, one) for module, names in _CLASSES.items() for one in names.split()}

# What runs what it is given, or opens a way to it: modules with all that is in them, and names.
# Modules are without underscores at their head: `_pickle` does what `pickle` does.
_MODULES = (
    "os posix nt subprocess posixsubprocess sys socket runpy shutil importlib imp zipimport "
    "pkgutil pty pickle cPickle marshal shelve ctypes codeop webbrowser bdb pdb timeit cProfile "
    "lsprof doctest pip ensurepip multiprocessing.util multiprocessing.spawn "
    "multiprocessing.reduction multiprocessing.connection "
    "torch.hub torch.package torch.distributed.rpc torch.distributed.run torch.distributed.launch "
    "torch.distributed.launcher torch.distributed.elastic torch.utils.cpp_extension "
    "torch.utils.collect_env torch.utils.bottleneck torch.utils.model_zoo torch.testing "
    "torch.multiprocessing.spawn torch.multiprocessing.reductions "
    "numpy.testing numpy.f2py numpy.distutils numpy.ctypeslib numpy.lib.format numpy.lib.npyio "
    "numpy.lib._npyio_impl"
)
_CALLS = (
    "torch.load torch.save torch.serialization.load torch.serialization._load torch.export.load "
    "torch.serialization._legacy_load torch.storage._load_from_bytes torch.jit.load "
    "torch.jit._serialization.load torch.ops.load_library torch.classes.load_library "
    "torch.multiprocessing.start_processes numpy.load numpy.save numpy.fromfile "
    "io.open io.open_code io.FileIO platform.popen code.interact code.InteractiveConsole "
    "code.InteractiveInterpreter profile.run profile.runctx profile.Profile trace.Trace "
    "codecs.open types.CodeType types.FunctionType commands.getoutput commands.getstatusoutput "
    "dill.load dill.loads dill._dill.load dill._dill.loads cloudpickle.load cloudpickle.loads "
    "joblib.load joblib.numpy_pickle.load"
)
_EVALUATE = ("eval", "exec", "execfile", "compile", "open", "__import__", "input", "breakpoint")
_BUILTINS = ("builtins", "builtin__", "builtins__")
_DANGEROUS = frozenset(
    (
        *_MODULES.split(),
        *_CALLS.split(),
        *(f"{module}.{one}" for module in _BUILTINS for one in _EVALUATE),
    )
)


def judge_names(names: Iterable[Name], own: Collection[str] = ()) -> Iterator[tuple[Kind, str]]:
    """Report which names of a pickle are no part of a checkpoint; `own` are packages that are."""
    foreign: list[str] = []
    for name in sorted(names):
        if name in _KNOWN:
            continue
        if runs_code(name):
            text = f"asks for {clip(str(name))}, which runs code where it is loaded: do not load it"
            yield Kind.DAMAGED, text
        elif name.module.partition(".")[0] not in own:
            foreign.append(str(name))
    if foreign:
        some = ", ".join(clip(each) for each in foreign[:5])
        yield Kind.NOTE, f"asks for {some}: torch.load(weights_only=True) may refuse it"


def runs_code(name: Name) -> bool:
    """Return whether a name runs what it is given.

    The second half of a name may have dots: `os.system` of `torch.serialization` is `os.system`.
    """
    steps = name.name.split(".")
    ways = [f"{name.module}.{name.name}", *(".".join(steps[at:]) for at in range(len(steps) - 1))]
    return any(_leads_to_danger(one.lstrip("_")) for one in ways)


def _leads_to_danger(path: str) -> bool:
    """Return whether a dotted path, or what it stands in, is one of those that run code."""
    parts = path.split(".")
    return any(".".join(parts[:length]) in _DANGEROUS for length in range(1, len(parts) + 1))
