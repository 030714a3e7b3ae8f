"""The recipes that come with RLinf, as YAML files; `rlinf config list` lists them."""
