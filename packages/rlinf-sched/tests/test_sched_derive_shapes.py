"""Shapes against public totals, datasheets against each other."""

import json

import pytest

from rlinf_sched import ClusterError, ProfileError
from rlinf_sched.derive import GPUS, ModelShape, find_gpu, find_model, gpu_cluster
from rlinf_sched.derive.shapes import MODELS

PUBLIC_PARAMETERS = {  # the sum over the tensors of the published checkpoints
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
}


@pytest.mark.parametrize("name", PUBLIC_PARAMETERS)
def test_parameters_are_those_of_the_published_checkpoints(name: str) -> None:
    assert find_model(name).num_parameters == PUBLIC_PARAMETERS[name]


def test_openvla_has_its_published_size() -> None:
    for name in ("OpenVLA-7B", "OpenVLA-OFT"):
        assert find_model(name).num_parameters == pytest.approx(7.54e9, rel=0.001)  # model card
        assert find_model(name).num_patches == 256


def test_pi0_has_the_published_sizes() -> None:
    for name in ("pi0", "pi0.5"):
        shape = find_model(name)
        assert shape.expert is not None
        # google/paligemma-3b-pt-224 has 2,923,335,408 parameters; the paper gives the expert 0.3e9
        assert shape.num_parameters - shape.expert.num_parameters == 2_923_335_408
        assert shape.expert.num_parameters == pytest.approx(0.3e9, rel=0.05)
        # nothing predicts a token: the table of embeddings is looked up alone
        assert shape.num_matmul_parameters == pytest.approx(1.98e9, rel=0.01)


def test_smolvla_has_the_published_size() -> None:
    shape = find_model("SmolVLA")
    assert shape.expert is not None
    head = 49_280 * 960  # of SmolLM2, in its files although nothing reads it
    assert shape.num_parameters + head == pytest.approx(0.45e9, rel=0.002)  # model card
    assert shape.expert.num_parameters == pytest.approx(98.2e6, rel=0.03)  # those of LeRobot's class
    assert (shape.num_patches, shape.vision_flops) == (64, 2.0 * shape.vision_parameters * 1024)


def test_llama_2_7b_from_its_configuration() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    }
    assert ModelShape.from_config(config).num_parameters == 6_738_415_616  # Hugging Face's count


def test_active_parameters_of_experts() -> None:
    shape = find_model("Qwen3-30B-A3B")
    assert shape.num_active_parameters == pytest.approx(3.3e9, rel=0.02)  # model card
    dense = find_model("Qwen2.5-7B")
    assert dense.num_active_parameters == dense.num_parameters


def test_kv_cache_of_a_token() -> None:
    # 28 layers, 4 heads of 128, keys and values, two bytes
    assert find_model("Qwen2.5-7B").kv_bytes_per_token == 28 * 4 * 128 * 2 * 2


def test_a_forward_pass_takes_two_operations_a_parameter() -> None:
    for shape in MODELS.values():
        assert shape.forward_flops(0) == pytest.approx(2 * shape.num_matmul_parameters)
    # the input table of an untied model is looked up, not multiplied
    shape = find_model("Qwen2.5-7B")
    assert shape.num_parameters - shape.num_matmul_parameters == 152064 * 3584


def test_attention_grows_with_its_context() -> None:
    shape = find_model("Qwen2.5-7B")
    # scores and their product with the values: 4 operations for each layer, position and unit
    assert shape.forward_flops(1000) - shape.forward_flops(0) == pytest.approx(4 * 28 * 3584 * 1000)


def test_shape_of_a_folder(tmp_path) -> None:
    config = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = ModelShape.from_folder(tmp_path)
    attention = 64 * 64 * 2 + 64 * 32 * 2 + 64 + 32 + 32
    assert shape.num_parameters == 2 * (attention + 3 * 64 * 128 + 2 * 64) + 100 * 64 + 64
    assert shape.name == tmp_path.name


def test_glm_has_its_published_sizes() -> None:
    """arXiv:2508.06471, table 1: without embedding and head, with a layer for multi-token prediction."""
    for name, total, active in (("GLM-4.5", 355e9, 32e9), ("GLM-4.5-Air", 106e9, 12e9)):
        shape = find_model(name)
        tables = 2 * shape.vocab_size * shape.hidden_size
        assert shape.num_parameters - tables == pytest.approx(total, rel=0.015)
        assert shape.num_active_parameters - tables == pytest.approx(active, rel=0.02)


def test_deepseek_v3_has_its_published_sizes() -> None:
    """arXiv:2412.19437: 671e9 parameters, 37e9 of them for a token; 70 KB of cache for each in bf16."""
    shape = find_model("DeepSeek-V3")
    assert shape.num_parameters == pytest.approx(671e9, rel=0.001)
    assert shape.num_active_parameters == pytest.approx(37e9, rel=0.02)
    assert shape.kv_bytes_per_token == 61 * 576 * 2
    # 128 heads: a product of 192 numbers with the keys, and one of 128 with the values
    assert shape.forward_flops(1000) - shape.forward_flops(0) == pytest.approx(61 * 2 * 128 * (192 + 128) * 1000)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_parameters_agree_with_the_model_library(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    number = dict.fromkeys(("glm4_moe", "deepseek_v3"), "n_routed_experts").get(kind)
    number = "num_experts" if kind == "qwen3_moe" else number
    experts = {number: 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if number else {}
    if kind == "glm4_moe":
        experts |= {"n_shared_experts": 2, "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1}
    if kind == "deepseek_v3":
        experts |= {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
        experts |= {"v_head_dim": 20, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
    config = transformers.AutoConfig.for_model(
        kind,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        **experts,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert ModelShape.from_config(config.to_dict()).num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3_mo"}, "did you mean 'qwen3_moe'"),
        ({"hidden_size": None}, "config.hidden_size is missing"),
        ({"num_hidden_layers": 0}, "config.num_hidden_layers=0 must be"),
        ({"vocab_size": "many"}, "config.vocab_size='many' must be"),
    ],
)
def test_a_wrong_configuration_names_its_key(tmp_path, change: dict, message: str) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ProfileError, match=message) as caught:
        ModelShape.from_folder(tmp_path)
    assert "config.json" in str(caught.value)


def test_a_folder_without_a_model(tmp_path) -> None:
    with pytest.raises(ProfileError, match="give the folder of a Hugging Face model"):
        ModelShape.from_folder(tmp_path)
    for text in ("{", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ProfileError, match="not valid JSON"):
            ModelShape.from_folder(tmp_path)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ProfileError, match=r"did you mean 'Qwen2.5-7B'"):
        find_model("Qwen2.5-7")
    with pytest.raises(ClusterError, match="did you mean 'H100'"):
        find_gpu("H1000")


def test_gpus_have_plausible_rates() -> None:
    for gpu in GPUS.values():
        assert gpu.node_bytes_per_s >= gpu.host_bytes_per_s
        assert gpu.memory_bytes_per_s > gpu.node_bytes_per_s > gpu.network_bytes_per_s
        assert 10e9 < gpu.memory_bytes < 1e12
    assert find_gpu("h200").memory_bytes > find_gpu("H100").memory_bytes


def test_cluster_of_gpus_fills_nodes() -> None:
    cluster = gpu_cluster("H100", 12)
    assert (cluster.num_devices, cluster.num_nodes) == (12, 2)
    assert cluster.links == find_gpu("H100").links
    with pytest.raises(ClusterError, match="num_devices=0"):
        gpu_cluster("H100", 0)
