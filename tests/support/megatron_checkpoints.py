"""Ranks of a small Llama or Qwen in megatron-core on CPU that save and load distributed checkpoints (torch_dist).

The truth is a model of transformers. Its weights, and optimizer state drawn in the shapes of its weights, are put into
megatron-core's tensors here with reshapes and concatenations, for any tp and pp, without ullage's table of names.
"""

import argparse
import contextlib
import hashlib
import multiprocessing
import os

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode

from tests.support.hugging_face_shapes import config_of as config_of_transformers
from tests.support.hugging_face_shapes import shapes_of
from tests.support.megatron_cpu import on_cpu

#: What differs from Llama: biases of q, k and v; norms of q and k; tied embeddings.
KINDS = {"llama": {}, "qwen2": {"add_qkv_bias": True, "tied": True}, "qwen3": {"qk_layernorm": True, "kv_channels": 16}}


class _HostForCuda(TorchFunctionMode):
    """The CPU where megatron-core's optimizers write ``device="cuda"`` and ask whether a tensor is on the GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return found.replace("torch.", "torch.cuda.")
        return found


@contextlib.contextmanager
def megatron_on_cpu():
    with on_cpu(), _HostForCuda():
        yield


def config_of(kind="llama", tp=1, pp=1, **more):
    fields = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48,
        **{k: v for k, v in KINDS[kind].items() if k != "tied"}, **more,
    }  # fmt: skip
    return TransformerConfig(
        **fields, normalization="RMSNorm", layernorm_epsilon=1e-6, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, use_cpu_initialization=True,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32,
        hidden_dropout=0.0, attention_dropout=0.0, gradient_accumulation_fusion=False, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip


VOCABULARY, PADDED = 60, 64
STATES = ("exp_avg", "exp_avg_sq")


def drawn(shapes, what):
    """Random tensors by name, the same in every process; positive ones for ``exp_avg_sq``."""
    found = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(int(hashlib.md5(f"{what} {name}".encode()).hexdigest()[:8], 16))
        value = torch.randn(shape, generator=generator) * 0.2
        found[name] = value.abs() if what == "exp_avg_sq" else value + ("norm" in name)
    return found


def as_megatron(state, name, tp, rank, heads=4, groups=2):
    """The part of tp rank ``rank`` of the whole model's parameter ``name``, from tensors by transformers' names."""
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tied = name.startswith("embedding") or "lm_head.weight" not in state
        tokens = state["model.embed_tokens.weight" if tied else "lm_head.weight"]
        padding = torch.full((PADDED - len(tokens), tokens.shape[1]), 7.0)
        return torch.cat([tokens, padding]).chunk(tp)[rank]
    if name == "decoder.final_layernorm.weight":
        return state["model.norm.weight"]
    _, _, layer, rest = name.split(".", 3)
    prefix = f"model.layers.{layer}."
    what = rest.rpartition(".")[2]
    if rest.startswith("self_attention.linear_qkv."):
        parts = [state[f"{prefix}self_attn.{n}_proj.{what}"] for n in "qkv"]
        grouped = torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], 1)
        return grouped.reshape(-1, *parts[0].shape[1:]).chunk(tp)[rank]
    if rest.startswith("mlp.linear_fc1."):
        return torch.cat([state[f"{prefix}mlp.{n}_proj.{what}"].chunk(tp)[rank] for n in ("gate", "up")])
    whole = {
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    }
    if rest in whole:
        return state[prefix + whole[rest]].chunk(tp, 1)[rank]
    equal = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    }
    return state[prefix + equal[rest]]


def build(config, kind):
    return GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm"),
        PADDED,
        64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=KINDS[kind].get("tied", False),
    )


class Job:
    """The model of one rank, under DDP, with megatron-core's optimizer."""

    def __init__(self, kind, tp, pp, dtype=torch.float32, distributed=True):
        # megatron-core writes its files from processes of its own, which a daemon may not have; the one that hands
        # their results on is forked like them, which spares it the start of an interpreter.
        multiprocessing.current_process()._config["daemon"] = False
        filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
        parallel_state.initialize_model_parallel(tp, pp)
        self.tp, self.tp_rank = tp, parallel_state.get_tensor_model_parallel_rank()
        half = dtype == torch.bfloat16
        self.config = config_of(kind, tp, pp, bf16=half, params_dtype=dtype)
        model = build(self.config, kind)
        self.model = model.bfloat16() if half else model
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
        self.ddp = DistributedDataParallel(self.config, ddp, self.model)
        config = OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=half, params_dtype=dtype, use_distributed_optimizer=distributed,
            clip_grad=0.0, weight_decay=0.01,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(config, [self.ddp])
        self.distributed = distributed

    def parameters(self):
        """Each parameter by the name that it has in the whole model."""
        for name, parameter in self.model.named_parameters():
            if name.startswith("decoder.layers."):
                number = int(name.split(".")[2])
                whole = self.model.decoder.layers[number].layer_number - 1
                name = name.replace(f"layers.{number}.", f"layers.{whole}.", 1)
            yield name, parameter

    def states(self):
        """(name, state key, tensor, slice of the flat parameter) of all that this rank's optimizer holds."""
        for optimizer in self.optimizer.chained_optimizers:
            for name, parameter in self.parameters():
                if self.distributed:
                    if parameter not in optimizer.model_param_gbuf_map:
                        continue
                    held = optimizer._get_main_param_and_optimizer_states(parameter)
                    place = optimizer._get_model_param_range_map(parameter)["param"]
                    part = slice(place.start, place.end)
                else:
                    main = getattr(parameter, "main_param", parameter)
                    held, part = {"param": main, **optimizer.optimizer.state[main]}, slice(None)
                yield from ((name, key, held[key], part) for key in ("param", *STATES))

    def load_optimizer(self, found):
        """Load the optimizer's state. With torch's Adam megatron-core 0.16.1 asks each parameter's state for a step,
        which it saves with the groups alone, so that it cannot load its own files: the step in memory is handed to it.
        """
        for optimizer in self.optimizer.chained_optimizers:
            take = optimizer._set_main_param_and_optimizer_states

            def take_with_step(parameter, tensors, take=take, optimizer=optimizer):
                held = optimizer._get_main_param_and_optimizer_states(parameter)
                take(parameter, {"step": held["step"], **tensors})

            optimizer._set_main_param_and_optimizer_states = take_with_step
        self.optimizer.load_state_dict(found)

    def make_state(self):
        """A step without gradients: torch's Adam has no state before, and megatron-core asks for it, also to load."""
        for parameter in self.ddp.parameters():
            parameter.main_grad.zero_()
        self.optimizer.step()

    @torch.no_grad()
    def fill(self, truth):
        """Take over weights and state. ``truth``: by key (``param`` and state keys), tensors by transformers' names."""
        for name, parameter in self.parameters():
            parameter.copy_(as_megatron(truth["param"], name, self.tp, self.tp_rank))
        self.make_state()
        for name, key, tensor, part in self.states():
            whole = as_megatron(truth[key], name, self.tp, self.tp_rank)
            tensor.copy_(whole.reshape(-1)[part].view(tensor.shape))
        for name, parameter in self.parameters():
            parameter.copy_(as_megatron(truth["param"], name, self.tp, self.tp_rank))

    def state_dict(self, metadata, loading=False, optimizer=True):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = {**metadata, "dp_cp_group": group}
        found = {"model": self.model.sharded_state_dict(metadata=metadata)}
        if optimizer:
            found["optimizer"] = self.optimizer.sharded_state_dict(found, is_loading=loading, metadata=metadata)
        return found

    def differences(self, truth, optimizer=True):
        """Names of parameters and states that are not the truth's."""
        found = []
        for name, parameter in self.parameters():
            expected = as_megatron(truth["param"], name, self.tp, self.tp_rank).to(parameter.dtype)
            if name.startswith(("embedding", "output_layer")):  # what was padding is nobody's
                rows = max(0, min(len(expected), VOCABULARY - self.tp_rank * len(expected)))
                expected, parameter = expected[:rows], parameter[:rows]
            found += [] if torch.equal(expected, parameter) else [name]
        for name, key, tensor, part in self.states() if optimizer else ():
            whole = as_megatron(truth[key], name, self.tp, self.tp_rank)
            if name.startswith(("embedding", "output_layer")):
                rows = max(0, min(len(whole), VOCABULARY - self.tp_rank * len(whole)))
                keep = torch.zeros(whole.shape, dtype=torch.bool)
                keep[:rows] = True
            else:
                keep = torch.ones(whole.shape, dtype=torch.bool)
            keep = keep.reshape(-1)[part]
            same = torch.equal(whole.reshape(-1)[part][keep], tensor.reshape(-1)[keep])
            found += [] if same else [f"{key} of {name}"]
        return found


METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def truth_of(kind):
    """Weights and optimizer state by transformers' names."""
    return {key: drawn(shapes_of(config_of_transformers(kind)), key) for key in ("param", *STATES)}


def save(rank, world, folder, kind, tp, pp, options):
    """Save the truth as Megatron-LM's training does. ``options``: dtype, metadata, distributed, optimizer, args."""
    torch.set_num_threads(1)
    with megatron_on_cpu():
        distributed = options.get("distributed", True)
        job = Job(kind, tp, pp, getattr(torch, options.get("dtype", "float32")), distributed)
        job.fill(truth_of(kind))
        metadata = {**METADATA, **options.get("metadata", {})}
        saved = job.state_dict(metadata, optimizer=options.get("optimizer", True))
        numbers = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
        args = {name: getattr(job.config, name) for name in (*numbers, "kv_channels")}
        sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        sizes["data_parallel_size"] = world // (tp * pp)
        args |= {**sizes, "group_query_attention": True, "swiglu": True, **options.get("args", {})}
        saved |= {"args": argparse.Namespace(**args), "iteration": 10, "checkpoint_version": 3.0}
        inner = f"{folder}/iter_0000010"
        os.makedirs(inner, exist_ok=True)
        dist_checkpointing.save(saved, inner, content_metadata=metadata)
    if rank == 0:
        with open(f"{folder}/latest_checkpointed_iteration.txt", "w") as tracker:
            tracker.write("10")
    return True


def load(rank, world, folder, kind, tp, pp, options):
    """Load what ullage wrote, as Megatron-LM's training does: the differences, the step, and the largest of logits."""
    torch.set_num_threads(1)
    truth = truth_of(kind)
    with megatron_on_cpu():
        optimizer = options.get("optimizer", True)
        job = Job(kind, tp, pp, getattr(torch, options.get("dtype", "float32")))
        if optimizer:
            job.make_state()
        metadata = dist_checkpointing.load_content_metadata(folder) or METADATA
        wanted = job.state_dict(metadata, loading=True, optimizer=optimizer)
        found = dist_checkpointing.load(wanted, folder)
        job.model.load_state_dict(found["model"])
        step = None
        if optimizer:
            job.load_optimizer(found["optimizer"])
            step = float(job.optimizer.param_groups[0]["step"])
        differences = job.differences(truth, optimizer)
        error = None
        if pp == 1:
            tokens = torch.arange(12)[None] % VOCABULARY
            mask = torch.ones(1, 1, 12, 12).triu(1).bool()
            with torch.no_grad():
                ours = job.model(tokens, torch.arange(12)[None], mask)[0, :, :VOCABULARY]
    if pp == 1:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = config_of_transformers(kind)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        assert {name: tuple(p.shape) for name, p in model.named_parameters()} == shapes_of(config)
        model.load_state_dict(truth["param"], strict=False)
        with torch.no_grad():
            error = float((ours - model.eval()(tokens).logits[0]).abs().max())
    return [differences, step, error, found["args"].num_layers]
