"""TRL's trainers with the operators in place of its fused head: the same steps as TRL's own, in float32."""

import contextlib
import copy
import csv
import importlib
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")

import torch
import torch.distributed as dist
import trl
from tiny_models import VOCAB, make_batch, make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast, set_seed
from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS, ChunkedLogProbFunction

import flce_ops
from flce_ops.integrations.trl import patch, patched, patching, unpatch, zero3
from flce_ops.integrations.trl.divergence import chunked_divergence_loss
from flce_ops.integrations.trl.log_probs import ChunkedLogProbs

# N tokens, D hidden, E hidden of a teacher, V vocabulary

STEPS = 3
EPSILON = torch.finfo(torch.float32).eps
UTILS, DISTILLATION = "trl.trainer.utils", "trl.trainer.distillation_trainer"


@pytest.fixture
def utils():
    # not at the top: with its trainers TRL takes seconds to import, which every process that collects tests would spend
    return importlib.import_module(UTILS)


@pytest.fixture
def their_divergence():
    return importlib.import_module(DISTILLATION)._chunked_divergence_loss


def texts(count: int, words: int, seed: int) -> list[str]:
    tokens = torch.randint(3, VOCAB, (count, words), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{token}" for token in row) for row in tokens.tolist()]


def prefer_even(completion_ids, **_) -> list[float]:
    return [float(sum(token % 2 == 0 for token in completion)) for completion in completion_ids]


TEXTS = {"text": texts(8, 9, seed=0)}
PROMPTS = {"prompt": texts(8, 4, seed=1)}
PAIRS = {**PROMPTS, "chosen": texts(8, 5, seed=2), "rejected": texts(8, 3, seed=3)}
UNPAIRED = {**PROMPTS, "completion": texts(8, 5, seed=2), "label": [True, False] * 4}
SAMPLED = {"max_completion_length": 5}
POLICY = {**SAMPLED, "num_generations": 2, "temperature": 0.7, "reward_funcs": prefer_even, "learning_rate": 0.1}

# name: (trainer, data, options, model). Learning rates: what STEPS move is above the rounding of a parameter.
RUNS = {
    "SFT": ("SFT", TEXTS, {"loss_type": "nll", "learning_rate": 0.5}, "Llama"),
    "SFT, tied head": ("SFT", TEXTS, {"gradient_accumulation_steps": 2, "learning_rate": 0.5}, "Llama tied"),
    "SFT by DFT, softcap": ("SFT", TEXTS, {"loss_type": "dft", "learning_rate": 20.0}, "Gemma2"),
    "DPO with WPO's weights": ("DPO", PAIRS, {"use_weighting": True, "learning_rate": 1.0}, "Granite"),
    "DPO, softcap": ("DPO", PAIRS, {"learning_rate": 1.0}, "Gemma2"),
    "KTO": ("KTO", UNPAIRED, {"learning_rate": 10.0}, "Cohere"),
    "GRPO, entropy bonus": ("GRPO", PROMPTS, {**POLICY, "beta": 0.1, "entropy_coef": 0.01}, "Llama"),
    "RLOO": ("RLOO", PROMPTS, POLICY, "Llama"),
    "distillation, reverse": ("Distillation", PROMPTS, {**SAMPLED, "beta": 1.0, "learning_rate": 0.2}, "Llama"),
    "distillation, jsd": ("Distillation", PROMPTS, {**SAMPLED, "beta": 0.4, "learning_rate": 0.2}, "Gemma2"),
}


@pytest.fixture(scope="module")
def tokenizer():
    names = {0: "<pad>", 2: "<eos>"}
    words = models.WordLevel({names.get(token, f"w{token}"): token for token in range(VOCAB)}, "w1")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w1")


def make_trainer(name: str, tokenizer, folder):
    from datasets import Dataset

    kind, data, options, model_name = RUNS[name]
    # one draw in every run of the tests: a sampled token is another one where rounding decides
    set_seed(3)
    model = make_model(model_name)
    model.save_pretrained(folder / "model")  # from where TRL reads its reference model
    model.config._name_or_path = str(folder / "model")
    options = {**options}
    extra = {"reward_funcs": options.pop("reward_funcs")} if "reward_funcs" in options else {}
    if kind == "Distillation":
        extra["teacher_model"] = make_model("Phi, head with bias")  # its hidden size is another one
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        optim="sgd",
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        **options,
    )
    rows = Dataset.from_dict(data)
    if kind == "SFT":
        extra["eval_dataset"] = rows
    return getattr(trl, f"{kind}Trainer")(
        model=model, args=args, train_dataset=rows, processing_class=tokenizer, **extra
    )


def train(name: str, tokenizer, folder) -> tuple[dict, dict, list[dict]]:
    """(parameters before, parameters after STEPS, what was logged at each)."""
    trainer = make_trainer(name, tokenizer, folder)
    before = {key: parameter.detach().clone() for key, parameter in trainer.model.named_parameters()}
    trainer.train()
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    after = {key: parameter.detach() for key, parameter in trainer.model.named_parameters()}
    return before, after, trainer.state.log_history


@pytest.mark.parametrize("name", RUNS)
def test_the_steps_of_a_trainer_are_those_of_trl(name, tokenizer, tmp_path, calls):
    _, theirs, their_logs = train(name, tokenizer, tmp_path)
    assert not calls
    with patched():
        before, ours, our_logs = train(name, tokenizer, tmp_path)
    assert len(calls) >= STEPS
    largest = max(float((theirs[key] - before[key]).abs().max()) for key in theirs)
    for key, expected in theirs.items():
        # seen: 5e-5 of the largest change by WPO, 3e-6 else, and a unit in the last place of the parameter
        atol = 1e-4 * largest + 2 * EPSILON * float(expected.abs().max())
        assert atol < 1e-3 * largest or "norm" in key, (key, atol, largest)
        torch.testing.assert_close(ours[key], expected, rtol=0, atol=atol, msg=lambda m, k=key: f"{k}: {m}")
    timed = ("runtime", "per_second", "step_time")
    for our_log, their_log in zip(our_logs, their_logs, strict=True):
        expected = {key: value for key, value in their_log.items() if not key.endswith(timed)}
        found = {key: our_log[key] for key in expected}
        assert found == pytest.approx(expected, rel=1e-4, abs=2e-6)  # seen: 2.4e-5, a norm of gradients


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Names of the operators that the integration called."""
    from flce_ops.integrations.trl import divergence, log_probs

    made: list[str] = []

    def counted(function):
        return lambda *args, **kwargs: [made.append(function.__name__), function(*args, **kwargs)][1]

    for module, function in [(log_probs, flce_ops.linear_log_probs), (divergence, flce_ops.linear_kl_div)]:
        monkeypatch.setattr(module, function.__name__, counted(function))
    return made


# --- the two stand-ins, against what they stand in for ---


def head_inputs(dtype: torch.dtype, *, bias: bool, tokens: int = 37):
    """hidden (N, D), weight (V, D), bias (V,), targets (N,)."""
    hidden, weight = torch.randn(tokens, 24), 0.5 * torch.randn(VOCAB, 24)
    leaves = [hidden, weight, torch.randn(VOCAB) if bias else None]
    leaves = [None if leaf is None else leaf.to(dtype).requires_grad_() for leaf in leaves]
    return *leaves, torch.randint(VOCAB, (tokens,))


def results_and_gradients(apply, inputs, options, outputs):
    inputs = [
        None if tensor is None else tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs
    ]
    found = apply(*inputs, *options, outputs)
    loss = sum((row * torch.linspace(-1, 1, len(row))).sum() for row in found[:2] if row is not None)
    loss.backward()
    return found, [None if tensor is None else tensor.grad for tensor in inputs[:3]]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap,scale,temperature", [(None, 1.0, 1.0), (None, 0.3, 0.7), (3.0, 1.7, 1.3)])
@pytest.mark.parametrize("outputs", [("log_probs", *OPTIONAL_OUTPUTS), ("log_probs", "entropy"), ("log_probs",)])
def test_every_output_is_that_of_trl(outputs, softcap, scale, temperature, bias):
    inputs, options = head_inputs(torch.float32, bias=bias), (temperature, 32, softcap, scale)
    ours = results_and_gradients(ChunkedLogProbs.apply, inputs, options, outputs)
    theirs = results_and_gradients(ChunkedLogProbFunction.apply, inputs, options, outputs)
    for name, our, their in zip(("log_probs", *OPTIONAL_OUTPUTS), ours[0], theirs[0], strict=True):
        assert (our is None) == (their is None) == (name not in outputs)
        if our is not None:
            # the entropy and sum of p^2 are differences of numbers near lse: 1e-6 of it
            torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
            assert our.requires_grad == (name in ("log_probs", "entropy"))
    for our, their in zip(ours[1], theirs[1]):
        if their is not None:
            torch.testing.assert_close(our, their, rtol=0, atol=1e-5 * float(their.abs().max()))  # seen: 3e-6


@pytest.mark.parametrize("autocast", [False, True])
def test_a_float32_head_under_bfloat16_hidden_states(autocast):
    """FSDP2's master weights, and mixed precision: float64's result, at least as near as TRL's."""
    hidden, weight, bias, targets = head_inputs(torch.float32, bias=True)
    hidden = hidden if autocast else hidden.detach().bfloat16().requires_grad_()
    exact = [None if t is None else t.detach().bfloat16().double() for t in (hidden, weight, bias)]
    expected, _ = results_and_gradients(
        ChunkedLogProbs.apply, (*(t.requires_grad_() for t in exact), targets), (0.9, 32, None, 1.0), OPTIONAL_OUTPUTS
    )
    errors = []
    for apply in (ChunkedLogProbs.apply, ChunkedLogProbFunction.apply):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found, gradients = results_and_gradients(
                apply, (hidden, weight, bias, targets), (0.9, 32, None, 1.0), OPTIONAL_OUTPUTS
            )
        assert found[0].dtype == torch.float32 and gradients[1].dtype == torch.float32
        errors.append([float((row - exact).norm() / exact.norm()) for row, exact in zip(found[:4], expected[:4])])
    for ours, theirs in zip(*errors):
        assert ours <= 1.5 * theirs


def test_no_token_at_all():
    hidden, weight, _, targets = head_inputs(torch.float32, bias=False, tokens=0)
    found = ChunkedLogProbs.apply(hidden, weight, None, targets, 1.0, 32)
    assert [row.shape for row in found] == [(0,)] * 5
    found[0].sum().backward()
    assert not weight.grad.any()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("items", [None, 50, torch.tensor(50.0)])
def test_the_divergence_is_that_of_trl(beta, items, their_divergence):
    def results(function):
        torch.manual_seed(0)
        student, teacher = torch.randn(3, 7, 24), torch.randn(3, 7, 32)
        weight, teacher_weight = (0.3 * torch.randn(VOCAB, size) for size in (24, 32))
        leaves = [student.requires_grad_(), weight.requires_grad_(), torch.randn(VOCAB).requires_grad_()]
        mask = (torch.rand(3, 7) < 0.6).long()
        loss, entropy, count = function(
            *(student, teacher, weight, teacher_weight.requires_grad_(), mask, beta, items, leaves[2], None),
            *(0.8, 1.2, None, 4.0, 1.5),
        )
        (3 * loss).backward()
        assert teacher_weight.grad is None
        return loss, entropy, count, *(leaf.grad for leaf in leaves)

    for ours, theirs in zip(results(chunked_divergence_loss), results(their_divergence), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6 * float(theirs.abs().max()))


# --- GKD, which has no place for a stand-in ---


@pytest.fixture(scope="module")
def gkd_trainers(tokenizer, tmp_path_factory):
    """Makes one of TRL's GKDTrainer or of the guide's, with a model and a teacher."""
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    guide = (Path(__file__).parents[1] / "docs" / "clients.md").read_text()
    (code,) = (block for block in re.findall(r"```py\n(.*?)```", guide, re.DOTALL) if "GKDTrainer" in block)
    names = {"GKDTrainer": GKDTrainer, "torch": torch, "flce_ops": flce_ops}
    exec(code, names)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    questions = zip(texts(8, 4, seed=1), texts(8, 5, seed=2))
    roles = [[{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] for ask, answer in questions]
    folder = str(tmp_path_factory.mktemp("gkd"))

    def make(ours: bool, *, bf16: bool = False, beta: float = 0.3):
        set_seed(3)
        args = GKDConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            optim="sgd",
            learning_rate=0.5,
            lr_scheduler_type="constant",
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=bf16,
            disable_tqdm=True,
            lmbda=0.0,  # nothing is sampled
            beta=beta,
        )
        kind = names["FusedGKDTrainer"] if ours else GKDTrainer
        models = {"model": make_model(), "teacher_model": make_model()}
        return kind(
            **models, args=args, train_dataset=Dataset.from_dict({"messages": roles}), processing_class=tokenizer
        )

    return make


@pytest.mark.filterwarnings("ignore::UserWarning")  # of what is experimental
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_loss_of_gkd_as_the_guide_writes_it(beta, gkd_trainers):
    trainers, batch = [gkd_trainers(ours, beta=beta) for ours in (True, False)], make_batch()
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    for inputs, items in ((batch, None), (batch, 11), (batch, torch.tensor(11)), (nothing, None)):
        results = []
        for trainer in trainers:
            trainer.model.zero_grad()
            loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=items)
            loss.backward()
            results.append((loss.detach(), trainer.model.lm_head.weight.grad.clone()))
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("bf16", [False, True])
def test_the_steps_of_gkd_as_the_guide_writes_them(bf16, gkd_trainers):
    """In bfloat16 the trunks run outside of the forward that accelerate has wrapped in autocast."""
    ours, theirs = (gkd_trainers(ours, bf16=bf16) for ours in (True, False))
    before = {name: parameter.detach().clone() for name, parameter in theirs.model.named_parameters()}
    dtypes = set()
    ours.model.model.norm.register_forward_hook(lambda _, args, out: dtypes.add(args[0].dtype))
    ours.model.model.layers[0].mlp.register_forward_hook(lambda _, args, out: dtypes.add(out.dtype))
    for trainer in (ours, theirs):
        trainer.train()
    expected = dict(theirs.model.named_parameters())
    largest = max(float((expected[name] - start).abs().max()) for name, start in before.items())
    for name, parameter in ours.model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=(2e-2 if bf16 else 1e-4) * largest)
    assert (torch.bfloat16 in dtypes) == bf16


# --- heads that are sharded ---


class TakenAway:
    """A stand-in for ZeRO-3: parameters are empty but inside of TRL's context, as DeepSpeed leaves them."""

    def __init__(self, *parameters) -> None:
        self.whole = {id(parameter): parameter.data for parameter in parameters}

    @contextlib.contextmanager
    def gather(self, *parameters):
        parameters = [parameter for parameter in parameters if parameter is not None]
        for parameter in parameters:
            parameter.data = self.whole[id(parameter)]
        yield
        for parameter in parameters:
            parameter.data = torch.empty(0)


@pytest.mark.parametrize("apply", [ChunkedLogProbs.apply, ChunkedLogProbFunction.apply], ids=["ours", "TRL's"])
def test_parameters_that_are_taken_away_before_backward(apply, monkeypatch, utils):
    hidden, weight, bias, targets = head_inputs(torch.float32, bias=True)
    weight, bias = torch.nn.Parameter(weight.detach()), torch.nn.Parameter(bias.detach())
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T + bias, targets, reduction="sum")
    wanted = torch.autograd.grad(expected, (hidden, weight, bias))
    zero = TakenAway(weight, bias)
    monkeypatch.setattr(utils, "maybe_gather_lm_head_ctx", zero.gather)
    monkeypatch.setattr(zero3, "is_deepspeed_zero3_enabled", lambda: True)
    with utils.maybe_gather_lm_head_ctx(weight, bias):
        log_probs = apply(hidden, weight, bias, targets, 1.0, 32, None, 1.0, ("log_probs",))[0]
        edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in (hidden, weight, bias)]
    assert weight.numel() == bias.numel() == 0
    gradients = torch.autograd.grad(-log_probs.sum(), edges)
    assert weight.numel() == bias.numel() == 0
    for gradient, expected in zip(gradients, wanted):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_head_that_fsdp2_has_sharded(one_process, utils):
    """TRL gathers it: full_tensor()."""
    model, batch = make_model("Llama"), make_batch()
    reference = copy.deepcopy(model)
    for module in (*model.model.layers, model):
        fully_shard(module)
    assert isinstance(model.lm_head.weight, DTensor)
    outputs = []
    for module in (model, reference):
        utils.add_fused_lm_head(module, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
        with patched() if module is model else contextlib.nullcontext():
            output = module(**batch, fused_lm_head=True)
        (output.loss + 0.1 * output.entropy.sum()).backward()
        outputs.append(output)
    assert outputs[0].keys() == outputs[1].keys()
    for name in outputs[1].keys():
        torch.testing.assert_close(outputs[0][name], outputs[1][name], rtol=1e-5, atol=1e-5)
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        atol = 1e-5 * float(expected.grad.abs().max())
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, rtol=0, atol=atol, msg=name)


def test_a_divergence_of_heads_that_fsdp2_has_sharded(one_process):
    hidden, teacher_hidden, mask = torch.randn(2, 5, 24), torch.randn(2, 5, 24), torch.ones(2, 5)
    losses, gradients = [], []
    for sharded in (True, False):
        torch.manual_seed(0)
        heads = [torch.nn.Linear(24, VOCAB) for _ in range(2)]
        if sharded:
            heads = [fully_shard(head) for head in heads]
        student, teacher = heads
        losses.append(
            chunked_divergence_loss(
                *(hidden, teacher_hidden, student.weight, teacher.weight, mask, 0.5, None, student.bias, teacher.bias)
            )
        )
        losses[-1][0].backward()
        gradients.append(student.weight.grad.full_tensor() if sharded else student.weight.grad)
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])


# --- patch and unpatch ---


def test_unpatch_puts_everything_back(utils, their_divergence):
    patch()
    patch()  # does nothing
    assert utils._ChunkedLogProbFunction is ChunkedLogProbs
    assert sys.modules[DISTILLATION]._chunked_divergence_loss is chunked_divergence_loss
    unpatch()
    assert utils._ChunkedLogProbFunction is ChunkedLogProbFunction
    assert sys.modules[DISTILLATION]._chunked_divergence_loss is their_divergence
    with pytest.raises(ValueError, match="trl is not patched"):
        unpatch()


def test_patched_leaves_patched_what_was_patched_before(utils):
    with patched():
        with patched():
            pass
        assert utils._ChunkedLogProbFunction is ChunkedLogProbs
    assert utils._ChunkedLogProbFunction is ChunkedLogProbFunction


def test_a_compiled_head_follows_patch_and_unpatch(utils, calls):
    hidden, weight, _, targets = head_inputs(torch.float32, bias=False)

    def head(hidden):
        return utils._ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32, None, 1.0, ("log_probs",))[0]

    expected, compiled = head(hidden), torch.compile(head, backend="eager")
    for context in (patched(), contextlib.nullcontext()):
        with context:
            torch.testing.assert_close(compiled(hidden), expected)
        assert calls == ["linear_log_probs"]


class Renamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs): ...


@pytest.mark.parametrize(
    "where,name,value,message",
    [
        (UTILS, "_ChunkedLogProbFunction", None, "utils._ChunkedLogProbFunction is not there"),
        (UTILS, "_ChunkedLogProbFunction", Renamed, "_ChunkedLogProbFunction to take .*'logit_scale'.* got .*'scale'"),
        (UTILS, "add_fused_lm_head", lambda model: None, "add_fused_lm_head to call _ChunkedLogProbFunction, which"),
        (UTILS, "add_fused_lm_head", None, "add_fused_lm_head to call _ChunkedLogProbFunction, which"),
        (DISTILLATION, "_chunked_divergence_loss", None, "_chunked_divergence_loss is not there"),
    ],
    ids=["gone", "other arguments", "not called", "caller gone", "divergence gone"],
)
def test_a_trl_that_has_moved_its_places_is_refused_by_name(where, name, value, message, monkeypatch):
    monkeypatch.setattr(importlib.import_module(where), name, value)
    kept = {place: place.get() for place in patching.REPLACEMENTS.functions}
    refusal = f"trl {trl.__version__}: .*{message}.*flce_ops knows it in trl 1.16; train without patch"
    with pytest.raises(NotImplementedError, match=refusal):
        patch()
    for place, value in kept.items():
        assert place.get() is value


def test_the_tested_version_is_the_one_that_the_refusal_names():
    assert trl.__version__.startswith(f"{patching.REPLACEMENTS.tested}.")


def test_an_output_that_is_not_known_is_refused():
    inputs = head_inputs(torch.float32, bias=False)
    with pytest.raises(NotImplementedError, match=r"TRL asks its head for \['top_k'\], which flce_ops does not have"):
        ChunkedLogProbs.apply(*inputs, 1.0, 32, None, 1.0, ("log_probs", "top_k"))


def test_the_benchmark_of_clients(tmp_path):
    from benchmarks import clients
    from benchmarks.client_steps import OURS, OWN, RETAINING

    sizes = "--tokens 8 --hidden 128 --vocabulary 101 --layers 1 --rounds 1 --ms 1 --device cpu".split()
    clients.main(["--cases", "trl:SFT dft", *sizes, "--out", str(tmp_path)])
    (path,) = tmp_path.rglob("clients.csv")
    with path.open(newline="") as file:
        rows = {row["provider"]: row for row in csv.DictReader(file)}
    assert list(rows) == [OWN, OURS, RETAINING]
    for row in rows.values():
        assert row["reason"] == "" and row["equal"] == "True" and float(row["head_ms"]) > 0
        assert float(row["err_dw"]) < float(row["tolerance"])
