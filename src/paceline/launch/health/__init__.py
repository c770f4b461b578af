"""Which workers hang or lag behind, and what can be seen of them."""
