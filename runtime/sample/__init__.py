"""From logits to token ids: stages in order, then one draw."""
