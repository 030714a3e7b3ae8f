"""Uses a trained robot policy: `rlinf play` films episodes, `rlinf eval --suite` evaluates it out of distribution."""
