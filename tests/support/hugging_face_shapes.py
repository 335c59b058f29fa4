"""Configs of small models of transformers, and the names and shapes of their weights, without transformers."""


def config_of(kind, **more):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16 if kind == "qwen3" else 8}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 60}
    rest = {"max_position_embeddings": 64, "tie_word_embeddings": kind == "qwen2", "rms_norm_eps": 1e-6}
    return {"model_type": kind, **heads, **sizes, **rest, **more}


def shapes_of(config):
    """Shapes by transformers' names, as its models have them."""
    hidden, ffn, channels = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * channels, config["num_key_value_heads"] * channels
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.q_proj.weight": (query, hidden), f"{prefix}mlp.down_proj.weight": (hidden, ffn)}
        shapes |= {f"{prefix}self_attn.{n}_proj.weight": (key, hidden) for n in "kv"}
        shapes |= {f"{prefix}mlp.{n}_proj.weight": (ffn, hidden) for n in ("gate", "up")}
        shapes |= {f"{prefix}{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, query)
        if config["model_type"] == "qwen2":
            shapes |= {f"{prefix}self_attn.{n}_proj.bias": (query if n == "q" else key,) for n in "qkv"}
        if config["model_type"] == "qwen3":
            shapes |= {f"{prefix}self_attn.{n}_norm.weight": (channels,) for n in "qk"}
    return shapes if config["tie_word_embeddings"] else {**shapes, "lm_head.weight": (config["vocab_size"], hidden)}
