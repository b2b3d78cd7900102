"""Names that libraries write into checkpoints, one by one: no list of what is dangerous decides.

Five sorts. Data: what torch loads with `weights_only=True`, what numpy 1 and 2 rebuild arrays
with, the parts of a DTensor and a ShardedTensor; these pass in silence. Classes: their instances
are made without a call of theirs, and get their attributes. Of those, classes that are handed on as
values: modules, optimizers and schedulers of torch, whose constructors only make parts of
themselves, and subclasses of tensors. Functions, which are values too: activations, losses. Makers:
they may be called, for they only make a value out of their arguments: enumerations, dates, paths,
generators of numpy. Whatever calls a value that is handed on can reach nothing but such names.

What stands here must be harmless with any arguments, objects with attributes of somebody's choice
too: no attribute that a text names is called, no file is written, nothing is imported by a text.

A name that is missing here is no accusation: whoever knows it vouches for it with `--allow-name`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.fsck.formats.dtypes import ITEM_SIZE
from ckpt_conformance.fsck.pickled.pickle_values import GETATTR, Name
from ckpt_conformance.fsck.source.findings import Kind
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ckpt_conformance.fsck.pickled.asked import Asked

_TYPES = (
    *("BFloat16", "Bool", "Byte", "Char", "ComplexDouble", "ComplexFloat", "Double", "Float"),
    *("Half", "Int", "Long", "Short", "QInt32", "QInt8", "QUInt2x4", "QUInt4x2", "QUInt8"),
)
_BITS = (
    *("bits1x8", "bits2x4", "bits4x2", "quint2x4", "quint4x2"),
    *(f"{sign}{bits}" for sign in ("int", "uint") for bits in range(1, 8)),
)
_OF_CLASSES = " ".join(f"{one}Storage {one}Tensor" for one in _TYPES)
_PLAIN = (
    "set frozenset complex bytearray bytes int float bool str list dict tuple slice range xrange "
    "object Ellipsis NotImplemented"
)
_ARRAYS, _FRAMES = "_reconstruct scalar", "_frombuffer"
_PLACEMENTS = "Shard Replicate Partial _Partial _StridedShard"
_SPECS = "DTensorSpec TensorMeta ShardOrderEntry"
_SHARDED = "torch.distributed._shard"
_DATA = {
    "builtins": _PLAIN,
    "__builtin__": f"{_PLAIN} long unicode",  # int and str, in protocols 0 to 2
    "_codecs": "encode",
    "array": "array _array_reconstructor",
    "collections": "OrderedDict Counter defaultdict deque",
    "copyreg": "_reconstructor",
    "copy_reg": "_reconstructor",
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
    "torch.jit._pickle": "build_intlist build_doublelist build_boollist build_tensorlist "
    "restore_type_tag",  # TorchScript's
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
    f"{_SHARDED}.sharded_tensor.api": "ShardedTensor ShardedTensor.ProcessGroupState",
    f"{_SHARDED}.sharded_tensor.metadata": "MEM_FORMAT_ENCODING ShardedTensorMetadata "
    "TensorProperties",
    f"{_SHARDED}.sharded_tensor.shard": "Shard",
    f"{_SHARDED}.sharding_spec.api": "EnumerableShardingSpec",
    f"{_SHARDED}.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
}

_TRAINERS = {
    "sft": "SFTConfig",
    "dpo": "DPOConfig",
    "kto": "KTOConfig",
    "orpo": "ORPOConfig",
    "cpo": "CPOConfig",
    "grpo": "GRPOConfig",
    "rloo": "RLOOConfig",
    "ppo": "PPOConfig",
    "reward": "RewardConfig",
    "online_dpo": "OnlineDPOConfig",
    "nash_md": "NashMDConfig",
    "xpo": "XPOConfig",
    "gkd": "GKDConfig",
    "bco": "BCOConfig",
    "prm": "PRMConfig",
}
_ATTRIBUTES = "AttributeDict"
_CALLBACKS = {"model_checkpoint": "ModelCheckpoint", "early_stopping": "EarlyStopping"}
_SCHEDULERS = (
    "LRScheduler _LRScheduler LambdaLR MultiplicativeLR StepLR MultiStepLR ConstantLR LinearLR "
    "ExponentialLR SequentialLR PolynomialLR CosineAnnealingLR ChainedScheduler ReduceLROnPlateau "
    "CyclicLR CosineAnnealingWarmRestarts OneCycleLR"
)
_OPTIMIZERS = {
    "adadelta": "Adadelta",
    "_adafactor": "Adafactor",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "adamax": "Adamax",
    "adamw": "AdamW",
    "asgd": "ASGD",
    "lbfgs": "LBFGS",
    "_muon": "Muon",
    "nadam": "NAdam",
    "radam": "RAdam",
    "rmsprop": "RMSprop",
    "rprop": "Rprop",
    "sgd": "SGD",
    "sparse_adam": "SparseAdam",
}
_MODULES = {
    "activation": "ReLU ReLU6 RReLU Hardtanh Sigmoid Hardsigmoid Tanh SiLU Mish Hardswish ELU CELU "
    "SELU GLU GELU Hardshrink LeakyReLU LogSigmoid Softplus Softshrink MultiheadAttention PReLU "
    "Softsign "
    "Tanhshrink Softmin Softmax Softmax2d LogSoftmax Threshold",
    "adaptive": "AdaptiveLogSoftmaxWithLoss",
    "batchnorm": "BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm LazyBatchNorm1d "
    "LazyBatchNorm2d LazyBatchNorm3d",
    "channelshuffle": "ChannelShuffle",
    "container": "Sequential ModuleList ModuleDict ParameterList ParameterDict",
    "conv": "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d LazyConv1d "
    "LazyConv2d LazyConv3d",
    "distance": "CosineSimilarity PairwiseDistance",
    "dropout": "Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout",
    "flatten": "Flatten Unflatten",
    "fold": "Fold Unfold",
    "instancenorm": "InstanceNorm1d InstanceNorm2d InstanceNorm3d",
    "linear": "Identity Linear Bilinear LazyLinear NonDynamicallyQuantizableLinear",
    "loss": "L1Loss NLLLoss KLDivLoss MSELoss BCELoss BCEWithLogitsLoss CrossEntropyLoss CTCLoss "
    "GaussianNLLLoss HuberLoss SmoothL1Loss TripletMarginLoss PoissonNLLLoss MarginRankingLoss",
    "normalization": "LocalResponseNorm CrossMapLRN2d LayerNorm GroupNorm RMSNorm",
    "padding": "ConstantPad1d ConstantPad2d ConstantPad3d ReflectionPad1d ReflectionPad2d "
    "ReplicationPad1d ReplicationPad2d ZeroPad1d ZeroPad2d ZeroPad3d CircularPad1d CircularPad2d",
    "pixelshuffle": "PixelShuffle PixelUnshuffle",
    "pooling": "AvgPool1d AvgPool2d AvgPool3d MaxPool1d MaxPool2d MaxPool3d AdaptiveAvgPool1d "
    "AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d "
    "LPPool1d LPPool2d",
    "rnn": "RNN LSTM GRU RNNCell LSTMCell GRUCell",
    "sparse": "Embedding EmbeddingBag",
    "transformer": "Transformer TransformerEncoder TransformerDecoder TransformerEncoderLayer "
    "TransformerDecoderLayer",
    "upsampling": "Upsample UpsamplingNearest2d UpsamplingBilinear2d",
}
_NODES_OF_CONFIGS = ("yacs.config", "fvcore.common.config", "detectron2.config.config")
_NODES = (
    "AnyNode IntegerNode FloatNode BooleanNode StringNode EnumNode BytesNode PathNode "
    "InterpolationResultNode"
)
_STATES = {"8bit": "OptimState8bit", "4bit": "OptimState4bit", "fp8": "OptimStateFp8"}
_VALUES = {  # classes
    "torch.optim.lr_scheduler": _SCHEDULERS,
    **{f"torch.optim.{name}": optimizer for name, optimizer in _OPTIMIZERS.items()},
    **{f"torch.nn.modules.{name}": modules for name, modules in _MODULES.items()},
    **{
        f"{module}.subclass_{name}": state
        for module in ("torchao.optim", "torchao.prototype.low_bit_optim")
        for name, state in _STATES.items()
    },
}
_POINTWISE = (
    "relu relu6 gelu silu elu selu celu leaky_relu prelu rrelu mish hardswish hardsigmoid hardtanh "
    "hardshrink softshrink tanhshrink softplus softsign softmax log_softmax tanh sigmoid"
)
_OF_TORCH_ITSELF = (
    "relu selu celu prelu rrelu hardshrink softmax log_softmax tanh sigmoid exp sin cos sqrt square"
)
_FUNCTIONS = {
    "torch.nn.functional": f"{_POINTWISE} softmin logsigmoid glu threshold _threshold normalize "
    "layer_norm cross_entropy mse_loss l1_loss smooth_l1_loss nll_loss kl_div huber_loss "
    "binary_cross_entropy binary_cross_entropy_with_logits",
    "torch._C._nn": "gelu softplus softshrink log_sigmoid silu relu6 leaky_relu mish",
    "torch._C": " ".join(f"_VariableFunctionsClass.{one}" for one in _OF_TORCH_ITSELF.split()),
    "torch.nn.init": "constant_ dirac_ eye_ kaiming_normal_ kaiming_uniform_ normal_ ones_ "
    "orthogonal_ sparse_ trunc_normal_ uniform_ xavier_normal_ xavier_uniform_ zeros_",
    "mmengine.logging.history_buffer": " ".join(
        f"HistoryBuffer.{one}" for one in ("min", "max", "mean", "current")
    ),
}
_CLASSES = {
    "argparse": "Namespace",
    "uuid": "UUID",
    "_io": "BytesIO",  # extra states of layers are held in it
    "io": "BytesIO",
    "transformers.training_args": "TrainingArguments",
    "transformers.training_args_seq2seq": "Seq2SeqTrainingArguments",
    "transformers.trainer_pt_utils": "AcceleratorConfig",
    "transformers.trainer_callback": "TrainerState TrainerControl ExportableState",
    "transformers.generation.configuration_utils": "GenerationConfig",
    "transformers.integrations.deepspeed": "HfTrainerDeepSpeedConfig HfDeepSpeedConfig",
    **{f"trl.trainer.{name}_config": config for name, config in _TRAINERS.items()},
    "accelerate.state": "PartialState",
    "accelerate.utils.dataclasses": "DeepSpeedPlugin FullyShardedDataParallelPlugin "
    "TorchDynamoPlugin ParallelismConfig GradientAccumulationPlugin DataLoaderConfiguration",
    "accelerate.parallelism_config": "ParallelismConfig",
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
    "deepspeed.utils.tensor_fragment": "tensor_fragment fragment_address",
    "deepspeed.runtime.zero.config": "DeepSpeedZeroConfig",
    "deepspeed.runtime.zero.offload_config": "DeepSpeedZeroOffloadParamConfig "
    "DeepSpeedZeroOffloadOptimizerConfig",
    "megatron.core.optimizer.optimizer_config": "OptimizerConfig",
    "megatron.core.transformer.transformer_config": "TransformerConfig MLATransformerConfig",
    "megatron.core.model_parallel_config": "ModelParallelConfig",
    "lightning.fabric.utilities.data": _ATTRIBUTES,
    "lightning_fabric.utilities.data": _ATTRIBUTES,
    "lightning.pytorch.utilities.parsing": _ATTRIBUTES,
    "pytorch_lightning.utilities.parsing": _ATTRIBUTES,
    **{f"lightning.pytorch.callbacks.{name}": one for name, one in _CALLBACKS.items()},
    **{f"pytorch_lightning.callbacks.{name}": one for name, one in _CALLBACKS.items()},
    "omegaconf.dictconfig": "DictConfig",
    "omegaconf.listconfig": "ListConfig",
    "omegaconf.base": "ContainerMetadata Metadata",
    "omegaconf.nodes": _NODES,
    "typing": "Any",
    "torch.optim.swa_utils": "AveragedModel SWALR",
    "torch.nn.modules.module": "_WrappedHook",  # of spectral_norm
    "torch.nn.parallel.data_parallel": "DataParallel",
    "torch.nn.utils.prune": "Identity PruningContainer CustomFromMask RandomUnstructured "
    "L1Unstructured RandomStructured LnStructured",
    "torch.nn.utils.weight_norm": "WeightNorm",
    "torch.nn.utils.spectral_norm": "SpectralNorm SpectralNormStateDictHook "
    "SpectralNormLoadStateDictPreHook",
    "torch._C": "_VariableFunctionsClass",  # what torch.relu and its like stand in
    "easydict": "EasyDict",
    "munch": "Munch",
    "ml_collections.config_dict.config_dict": "ConfigDict FrozenConfigDict",
    **dict.fromkeys(_NODES_OF_CONFIGS, "CfgNode"),
    "mmengine.config.config": "Config",
    "mmengine.logging.history_buffer": "HistoryBuffer",
    "collections": "ChainMap UserDict UserList",
    "UserList": "UserList",  # in protocols 0 to 2, as the next one
    "UserDict": "UserDict IterableUserDict",
    "torch.amp.grad_scaler": "GradScaler",
    "torch.cuda.amp.grad_scaler": "GradScaler",
    "numpy": "memmap matrix recarray record",
    "numpy.rec": "recarray",
    "numpy.ma": "MaskedArray",
    "numpy.ma.core": "MaskedArray",
}
_ERRORS = (
    "Exception ArithmeticError AssertionError AttributeError FloatingPointError IndexError "
    "KeyError KeyboardInterrupt LookupError MemoryError NotImplementedError OSError OverflowError "
    "RuntimeError StopIteration TypeError ValueError ZeroDivisionError"
)
_RETURNED = (
    "aminmax cummax cummin frexp geqrf histogram kthvalue linalg_cholesky_ex linalg_eig "
    "linalg_eigh linalg_inv_ex linalg_ldl_factor linalg_lstsq linalg_lu linalg_lu_factor linalg_qr "
    "linalg_slogdet linalg_svd lu_unpack max median min mode nanmedian qr slogdet sort svd topk "
    "triangular_solve"
)
_PATHS = "PurePath PurePosixPath PureWindowsPath Path PosixPath WindowsPath"
_MAKERS = {
    "datetime": "datetime date time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "functools": "partial",
    "itertools": "count",
    "ipaddress": "IPv4Address IPv6Address IPv4Network IPv6Network IPv4Interface IPv6Interface",
    "re": "_compile",
    "signal": "Signals",
    **dict.fromkeys(("builtins", "exceptions"), _ERRORS),
    "torch.torch_version": "TorchVersion",  # a text: torch.__version__
    "torch.return_types": _RETURNED,
    "torch.nn.utils.rnn": "PackedSequence",
    "numpy._core._internal": "_convert_to_stringdtype_kwargs",
    "mmengine.config.config": "ConfigDict",
    "addict.addict": "Dict",
    "types": "SimpleNamespace",  # no instance of it is pickled without a call
    "random": "Random",
    "torch": "Generator",
    "torch._C": "Generator",
    "torch.nn.parameter": "UninitializedParameter UninitializedBuffer",
    "numpy": "bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64",
    "numpy.random._pickle": "__generator_ctor __bit_generator_ctor __randomstate_ctor",
    "numpy.random.mtrand": "RandomState",
    "numpy.random._generator": "Generator",
    "numpy.random._mt19937": "MT19937",
    "numpy.random._pcg64": "PCG64 PCG64DXSM",
    "numpy.random._philox": "Philox",
    "numpy.random._sfc64": "SFC64",
    "numpy.random.bit_generator": "SeedSequence __pyx_unpickle_SeedSequence",
    "numpy.ma.core": "_mareconstruct",
    "transformers.trainer_utils": "IntervalStrategy SchedulerType HubStrategy SaveStrategy "
    "EvaluationStrategy FSDPOption EvalPrediction",
    "transformers.training_args": "OptimizerNames ParallelMode",
    "transformers.debug_utils": "DebugOption",
    "accelerate.utils.dataclasses": "DistributedType PrecisionType DynamoBackend LoggerType "
    "ComputeEnvironment SageMakerDistributedType RNGType",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config": "OffloadDeviceEnum",
    "megatron.core.enums": "ModelType",
    "megatron.core.transformer.enums": "AttnBackend AttnMaskType AttnType LayerType ModelType",
    "megatron.core.rerun_state_machine": "RerunMode RerunState RerunDiagnostic",
    "torch.distributed.fsdp.api": "ShardingStrategy StateDictType BackwardPrefetch",
}


def _names(table: dict[str, str]) -> frozenset[Name]:
    return frozenset(Name(module, one) for module, names in table.items() for one in names.split())


DATA = _names(_DATA)
"""Names that pass in silence, however they are used."""

NOT_CALLED = frozenset(
    {
        Name("torch.distributed.device_mesh", "DeviceMesh"),  # a call opens a process group
        Name(f"{_SHARDED}.sharded_tensor.api", "ShardedTensor"),
        Name("numpy", "ndarray"),  # a call takes the memory of any object
    }
)
"""Data of which instances are made only."""

_NESTED = Name("torch.nested._internal.nested_tensor", "_rebuild_njt")

NOT_HANDED = frozenset({Name("numpy", "dtype")})
"""Data that is called by its name only: whatever else makes one of it is not looked at."""

MAKERS = _names(_MAKERS)
"""Names that may be called, and are told."""

VALUES = _names(_VALUES)
"""Classes that may be handed on, too, but not called; they are told."""

FUNCTIONS = _names(_FUNCTIONS)
"""Functions of torch and others that may be values, and are told; a call of theirs is unsafe."""

CLASSES = _names(_CLASSES) | VALUES
"""Classes of which instances may be made without a call, and which are told."""


# -- what a pickle asks for ------------------------------------------------------------------------

_MOST_UNSAFE = 200  # names of one pickle that are told one by one
ANY = "*"
"""Stands for what no single name vouches for."""


def judge_names(asked: Asked, own: Collection[str] = ()) -> Iterator[tuple[Kind, str, str]]:
    """Yield (what it means, in words, the unsafe name) of names that a pickle asks for.

    The last is empty where a name is told only. `own` are packages whose code is in the file.
    """
    told: list[str] = []
    unsafe = 0
    for trick in sorted(asked.tricks):
        yield Kind.UNSAFE, f"{trick}: to load it may run code", ANY
    misused = _misused(asked)
    for name in sorted(asked.names - ((DATA | GETATTR) - misused)):
        if name.module.partition(".")[0] in own:
            continue
        if _is_told(name, asked) and name not in misused:
            told.append(str(name))
            continue
        unsafe += 1
        if unsafe <= _MOST_UNSAFE:
            yield Kind.UNSAFE, _why(name, asked), str(name)
    if unsafe > _MOST_UNSAFE:
        yield Kind.UNSAFE, f"asks for {unsafe - _MOST_UNSAFE} more names like these", ANY
    if told:
        some = ", ".join(clip(each) for each in told[:5])
        yield Kind.NOTE, f"asks for {some}: torch.load(weights_only=True) may refuse it", ""


def _is_told(name: Name, asked: Asked) -> bool:
    """Return whether a name is one that libraries write, and is used as they do."""
    if name in MAKERS:
        return True
    if name in VALUES | FUNCTIONS:
        return name not in asked.called
    return name in CLASSES and name not in asked.called | asked.handed


def _misused(asked: Asked) -> set[Name]:
    """Return names of data that are used as nobody writes them."""
    called = (NOT_CALLED | GETATTR) & asked.called
    handed = (NOT_CALLED | NOT_HANDED | GETATTR) & asked.handed
    return {*called, *handed, *(one for one in asked.rebuilt if not _makes_tensors(one))}


def _makes_tensors(name: Name) -> bool:
    return name.module == "torch._utils" or name == _NESTED


def _why(name: Name, asked: Asked) -> str:
    if name in (CLASSES | NOT_CALLED | NOT_HANDED) - asked.rebuilt:
        verb = "calls" if name in asked.called else "gives something else the class"
        shown = f"{verb} {clip(str(name))}, of which libraries only make instances"
        return f"{shown}: to load it may run code (--allow-name NAME, if you know it)"
    if name in (DATA | MAKERS) & asked.rebuilt:
        shown = f"rebuilds a tensor by {clip(str(name))}, which makes none"
        return f"{shown}: to load it may run code"
    verb = "calls" if name in asked.called else "asks for"
    shown = f"{verb} {clip(str(name))}, which is not in fsck's list"
    return f"{shown}: to load it may run code (--allow-name NAME, if you know it)"
