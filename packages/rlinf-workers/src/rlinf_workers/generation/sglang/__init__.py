"""SGLang as a generation engine."""
