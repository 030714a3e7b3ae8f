"""Typed config: the schema of recipes (schema), loading (load) and checks of the files they name (inputs). Never
imports torch."""
