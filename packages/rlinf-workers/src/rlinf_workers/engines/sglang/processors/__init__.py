"""What SGLang imports in place of its own processors of pictures (its env var SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE)."""
