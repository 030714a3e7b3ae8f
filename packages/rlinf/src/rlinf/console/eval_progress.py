"""Progress of an evaluation: a live line for the current benchmark, or a line per tenth without a terminal."""

from __future__ import annotations

from rlinf.console.live_line import LiveLine, clock_time

NUM_LINES = 10
"""Lines printed per benchmark if the output is not a terminal."""


class EvalProgress(LiveLine):
    """Prints the progress of an evaluation.

    Example: `AIME 24  12/30 problems  avg@8 41.7 %  eta 2:31`; on a terminal the eta comes first.
    """

    def begin(self, title: str, *, num_problems: int, num_done: int, num_samples: int, num_right: int) -> None:
        """Starts a benchmark, of which `num_done` problems were answered in an earlier session."""
        self._title, self._num_problems, self._num_samples = title, num_problems, num_samples
        self._num_before = self._num_done = num_done
        self._num_right = num_right
        self._started_s = self._clock()
        if self._is_live:
            self.show(f"{title}  {num_done}/{num_problems} problems", num_done, num_problems)

    def problem(self, num_right: int) -> None:
        """Counts one more problem, with `num_right` right samples."""
        self._num_done += 1
        self._num_right += num_right
        done, total = self._num_done, self._num_problems
        share = self._num_right / (done * self._num_samples)
        text = f"{self._title}  {done}/{total} problems  avg@{self._num_samples} {100 * share:.1f} %"
        if done < total:
            eta_s = (total - done) * (self._clock() - self._started_s) / (done - self._num_before)
            eta = f"eta {clock_time(eta_s)}"
            text = f"{eta}  {text}" if self._is_live else f"{text}  {eta}"
        self.show(text, done, total, stays=done * NUM_LINES // total > (done - 1) * NUM_LINES // total)
