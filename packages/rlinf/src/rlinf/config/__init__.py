"""Typed config: what a recipe may say (schema), where it comes from (load), and the files it names (inputs). Never
imports torch."""
