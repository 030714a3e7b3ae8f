"""Finds the convention on which a robot policy and its environment disagree: `rlinf check` of a robot's set-up."""
