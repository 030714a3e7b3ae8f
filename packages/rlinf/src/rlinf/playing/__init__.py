"""A trained robot policy by itself: `rlinf play` shows it at work, `rlinf eval --suite` asks how far it carries."""
