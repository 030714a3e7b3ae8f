"""The backend whose replicas cut a model by tensor, pipeline and expert parallelism: megatron-core."""
