"""The backend with tensor, pipeline and expert parallelism: megatron-core."""
