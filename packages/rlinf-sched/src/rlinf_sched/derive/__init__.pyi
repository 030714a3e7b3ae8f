from .datasheets import (
    GPUS as GPUS,
    GPUS_PER_NODE as GPUS_PER_NODE,
    Gpu as Gpu,
    find_gpu as find_gpu,
    gpu_cluster as gpu_cluster,
    sheet_of as sheet_of,
)
from .generation import (
    continuous_points as continuous_points,
    group_cache_tokens as group_cache_tokens,
)
from .groups import profile_of_groups as profile_of_groups
from .lengths import (
    MEAN_SHARE_OF_LIMIT as MEAN_SHARE_OF_LIMIT,
    Lengths as Lengths,
)
from .memory import (
    CPU_CHUNK_BYTES as CPU_CHUNK_BYTES,
    FLOAT_BYTES as FLOAT_BYTES,
    GPU_CHUNK_BYTES as GPU_CHUNK_BYTES,
    MAX_LOGITS_BYTES as MAX_LOGITS_BYTES,
    NUM_MOMENTS as NUM_MOMENTS,
    Adapter as Adapter,
    JobShape as JobShape,
    RankMemory as RankMemory,
    batch_memory as batch_memory,
    feed_forward_bytes as feed_forward_bytes,
    forward_memory as forward_memory,
    kv_bytes as kv_bytes,
    packed_pass as packed_pass,
    sft_warm_up_bytes as sft_warm_up_bytes,
    update_bytes as update_bytes,
)
from .memory.rank import MEMORY_KINDS as MEMORY_KINDS
from .parallel import (
    InstanceLayout as InstanceLayout,
    bubble_s as bubble_s,
    ring_bytes_per_s as ring_bytes_per_s,
)
from .profiles import (
    Embodied as Embodied,
    Reasoning as Reasoning,
    derive_profiles as derive_profiles,
    rule_profile as rule_profile,
)
from .shapes import (
    LLAMA_2_7B as LLAMA_2_7B,
    ModelShape as ModelShape,
    find_model as find_model,
    resolve_model as resolve_model,
    with_vision_towers as with_vision_towers,
)
from .simulators import (
    CORES_PER_DEVICE as CORES_PER_DEVICE,
    LIBERO as LIBERO,
    MANISKILL_PUT_ON_PLATE as MANISKILL_PUT_ON_PLATE,
    SIMULATORS as SIMULATORS,
    CpuSimulator as CpuSimulator,
    GpuSimulator as GpuSimulator,
    on_busy_cores as on_busy_cores,
)
from .steps import (
    batch_profile as batch_profile,
    describe_numbers as describe_numbers,
    forward_s as forward_s,
    launch_s as launch_s,
    num_passes as num_passes,
    proportional as proportional,
    read_profile as read_profile,
)
from .training import (
    train_profile as train_profile,
)
from .workloads import (
    WORKLOADS as WORKLOADS,
    embodied as embodied,
    grpo as grpo,
    ppo as ppo,
    workload as workload,
)
