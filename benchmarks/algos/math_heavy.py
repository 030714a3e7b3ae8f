"""How long the math reward takes to give up on answers that cost too much, also on a busy machine:
`python -m benchmarks.algos.math_heavy`.

Each answer is checked alone, by the clock, without and with `--load` processes that do nothing but count.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter

from benchmarks.harness import report

from rlinf_algos.rewards import MathReward

HEAVY = {
    "tower of powers": "9^{9^{9^9}}",
    "power of a power": "7^{10^{10}}",
    "difference of towers": "9^{9^{9}}-9^{9^{9}}+x^{9^{9}}",
    "factorial": "10000000!",
    "factorial of a factorial": "((20!)!)!",
    "binomial": r"\binom{10^{9}}{5\cdot10^{8}}",
    "sum": r"\sum_{i=1}^{10^{12}}i^{i}",
    "product": r"\prod_{i=1}^{10^{9}}(i^2+1)",
    "integral": r"\int_0^{10^9}\frac{\sin(x^{x^2})e^{\cos(x^5)}}{x^x+\ln(x+1)^{x}}dx",
    "double integral": r"\int_0^{1}\int_0^{1}\sin(e^{xy^{9}})^{\cos(xy)}dx dy",
    "limit": r"\lim_{x\to0}\frac{\sin(\tan(x))-\tan(\sin(x))}{\arcsin(\arctan(x))-\arctan(\arcsin(x))}",
    "polynomial": "(x+y+z+1)^{5000}-(x+y+z)^{4999}",
    "polynomial written out": "+".join(f"{i}x^{{{i}}}y^{{{97 - i}}}" for i in range(1, 65)),
    "nested powers": "x^{" * 60 + "x" + "}" * 60,
    "nested roots": r"\sqrt{1+" * 80 + "x" + "}" * 80,
    "nested fractions": r"\frac{1}{1+" * 80 + "x" + "}" * 80,
    "nested sines": r"\sin(" * 150 + "x" + ")" * 150,
    "brackets": "(" * 450 + "x" + ")" * 450,
    "long number": "2^{" + "9" * 900 + "}",
    "logarithm": r"\log_{2}(3^{4^{5^{6}}})",
    "modulus": r"3^{10^{9}}\bmod 7^{10^8}",
    "absolute values": "|" * 200 + "x" + "|" * 200,
    "matrix": r"\begin{pmatrix}2&1\\1&x\end{pmatrix}^{100000}",
    "list of powers": ",".join(f"{i}^{{{i}^{{{i}}}}}" for i in range(5, 25)),
}
REFERENCE = r"\frac{\sqrt{2}x^{2}+1}{3}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", type=int, default=20, help="counting processes")
    arguments = parser.parse_args()
    results = {f"{load} counting": _measure(load) for load in (0, arguments.load)}
    report(
        "math-heavy",
        settings={"load": arguments.load, "reference": REFERENCE},
        samples_s={name: [seconds for seconds, _ in rows.values()] for name, rows in results.items()},
        comparisons=[],
        findings={
            "slowest_s": {name: max(seconds for seconds, _ in rows.values()) for name, rows in results.items()},
            "outcomes": {
                name: dict(Counter(outcome for _, outcome in rows.values())) for name, rows in results.items()
            },
            "each": {name: dict(rows) for name, rows in results.items()},
        },
    )


def _measure(load: int) -> dict[str, tuple[float, str]]:
    """name -> (seconds, outcome)."""
    busy = []
    with MathReward(num_processes=1) as reward:
        reward(r"\boxed{\frac{2}{\sqrt{2}}}", r"\sqrt{2}")
        try:
            busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
            rows = {}
            for name, answer in HEAVY.items():
                start = time.perf_counter()
                outcome = reward(rf"\boxed{{{answer}}}", REFERENCE).outcome
                rows[name] = time.perf_counter() - start, outcome
                print(f"{load:>3} busy: {name:<26} {rows[name][0]:6.2f} s {outcome}", flush=True)
        finally:
            for process in busy:
                process.kill()
                process.wait()
    return rows


if __name__ == "__main__":
    main()
