"""LIBERO: suites of language-conditioned tasks on MuJoCo."""
