"""The description of a case. It has no tensors; problem.py makes them from its seed."""

from dataclasses import dataclass, fields

# N tokens, K classes of a target, D hidden, V vocabulary, E hidden of the teacher

FUNCTIONS = ("cross_entropy", "metrics", "head", "loss_module", "log_probs", "kl_div", "given_logits", "policy")
FUNCTIONS += ("token_loss",)
LAYOUTS = ("rows", "columns", "both strides", "wide rows", "offset", "expanded", "repeated")

# How derivatives are taken. Only this package uses the others; plain torch uses "grad" in their place.
SECOND_ORDER = ("create_graph", "func_twice", "hvp", "third")  # third derivatives are taken, and not compared
SPARSE_MODES = ("backward", "grad", "retain_graph", "checkpoint", "reentrant_checkpoint", "saved_tensor_hooks")
BUFFER_MODES = (  # modes with main_grad; "zeroed": the buffer is zeroed between forward and backward
    *("backward", "checkpoint", "reentrant_checkpoint", "saved_tensor_hooks"),
    *("two_forwards", "two_backwards", "zeroed"),
    "compile_aot",  # whose buffer must not change between forward and backward
)
MODES = (
    *("backward", "grad", "retain_graph", "create_graph_once", *SECOND_ORDER, "func", "batched", "vmap"),
    *("checkpoint", "reentrant_checkpoint", "saved_tensor_hooks", "no_grad", "inference_mode"),
    *("two_forwards", "two_backwards", "compile_eager", "compile_aot", "forward_mode"),
)

# Who holds what: DTensors on a mesh of one rank, whose shards are whole. (Meshes of more: tests/layouts.)
MESHES = ("", "tokens", "classes")
MESH_MODES = ("backward", "grad", "retain_graph", "no_grad", "saved_tensor_hooks", "two_backwards")

# What the arguments have to do with each other; any that do not contradict may be together.
RELATIONS = (
    "tied",  # input = tanh(weight[ids])
    "same",  # input is weight
    "trunk",  # input passes through a layer made of weight
    "inner weight",  # weight is not a leaf
    "bias of weight",
    "token_weight of weight",
    "token_weight of input",
    "token_weight of losses",  # the token weights are losses of an earlier call of the function
    "normalizer of token_weight",
    "normalizer of input",
    "class_weight of weight",  # class weights made from the detached weight
    "penalty",  # the objective uses input and weight a second time
    "two calls",
)

LOG_PROB_METRICS = ("log_sum_sq_probs", "mean_logit")
METRICS = ("lse", "entropy", *LOG_PROB_METRICS, "z_loss")
ARGMAX_METRICS = ("argmax", "is_top1", "token_accuracy")


@dataclass(frozen=True)
class Case:
    """The defaults are the simplest case. A failing case is reduced towards them."""

    seed: int = 0
    function: str = "cross_entropy"
    mode: str = "grad"
    tokens: tuple[int, ...] = (7,)
    D: int = 5
    V: int = 11
    dtype: str = "float32"
    autocast: str = ""
    half_input: bool = False  # under autocast: input is in the autocast dtype, the parameters are in float32
    relations: tuple[str, ...] = ()
    wants: tuple[str, ...] = ("input", "weight")
    views: tuple[str, ...] = ()  # arguments that are a view into a larger leaf
    input_layout: str = "rows"
    weight_layout: str = "rows"
    vector_layout: str = "rows"  # layout of vectors with an entry per class or token
    transposed_tokens: bool = False
    data: str = "zipf"
    targets: str = "likely"
    ignored: float = 0.0
    ignore_index: int = -100
    int32: bool = False
    poison: str = ""  # what the hidden states of ignored tokens contain
    cotangent: str = "ones"
    factor: float = 1.0
    reduction: str = "mean"
    bias: str = ""
    class_weight: str = ""
    token_weight: str = ""
    normalizer: str = ""
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    z_loss: float = 0.0
    learnt: str = ""  # an option that is given as a tensor that needs a gradient
    entropy: bool = False
    argmax: bool = False
    kind: str = "forward"
    beta: float = 0.5
    teacher: str = "hidden"
    teacher_scale: float | None = None
    teacher_softcap: float | None = None
    E: int = 4
    topk: int = 0  # classes of a token, with target_weight; 0 for a single class
    tail: bool = False
    # names of return_metrics; if function is "metrics" and there are no names, it is True
    metrics: tuple[str, ...] = ()
    shift: bool = False
    objective: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_factor: float = 0.0
    kl_estimator: str = "k3"
    on_policy: bool = False  # on-policy: without old log-probabilities
    formula: str = "-lp"  # of a token loss, in lp, a tensor a and a number g, and in what it reads
    reads: tuple[str, ...] = ()
    sparse: str = ""  # gradient_mode, with a gradient_threshold
    threshold: float = 2.0**-6
    class_order: bool = False  # gradient_class_order, a permutation
    main_grad: str = ""  # dtype of the buffer: "own" is the weight's, "sums" float32 or float64
    mesh: str = ""  # what is sharded
    workspace: int = 0  # bytes; 0 for the default
    short_chunks: bool = False  # the fewest rows of a chunk lowered, so that few tokens make several
    handed_over: bool = False  # the logits may be overwritten
    uninitialized: bool = False  # fill torch.empty with nan

    @property
    def count(self) -> int:
        count = 1
        for size in self.tokens:
            count *= size
        return count

    def __str__(self) -> str:
        """What differs from the simplest case."""
        changed = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return ", ".join(changed)
