"""lm-eval's remote tokenizer, by which it asks a server for log-likelihoods without a tokenizer of its own."""

from __future__ import annotations

from lm_eval.utils import RemoteTokenizer, check_remote_tokenizer_support


def test_the_remote_tokenizer_is_the_servers(server):
    url = server.base + "/v1/completions"
    assert check_remote_tokenizer_support(url)
    tokenizer = RemoteTokenizer(url)
    text = "The lighthouse — 灯台 — stands."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.batch_decode([tokenizer.encode("One"), tokenizer.encode("two")]) == ["One", "two"]
    assert tokenizer.encode(tokenizer.eos_token) == [tokenizer.eos_token_id]
    assert tokenizer.encode(tokenizer.bos_token) == [tokenizer.bos_token_id]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    counted = server.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})[1]
    assert tokenizer.encode(chat) == counted["tokens"]
