"""Prompts for real models: chat, code, unicode, long ones; each with its kind."""

from __future__ import annotations

CHAT = [
    "What is the capital of France?",
    "Give me three tips for sleeping well.",
    "Write a haiku about the sea.",
    "Explain what a hash table is to a child.",
    "Who wrote 'Pride and Prejudice', and when?",
    "Translate 'good morning' into Spanish, French and German.",
    "What is 17 * 23? Show your steps.",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "hi",
]
CODE = [
    "def fibonacci(n):\n    ",
    "import numpy as np\n\n# multiply two matrices\n",
    "SELECT name, COUNT(*) FROM users WHERE",
    "#include <stdio.h>\n\nint main(void) {\n\tfor (int i = 0;",
    '{"name": "oneloop", "version": "0.1.0", "dependencies": {',
    "<html>\n<head>\n<title>",
]
UNICODE = [
    "日本の首都は",
    "Привет, как дела?",
    "The emoji 🎉🚀👩‍👩‍👧 means",
    "Zażółć gęślą jaźń",
    "مرحبا بالعالم",
    "e\u0301 is not é, but",
    "\u200b\t  \n\n   x",
]
LONG = [
    "Once upon a time there was a river. " * 380 + "The end of it",
    "\n".join(f"{i}. {'ab' * (i % 9)} → {i * i}" for i in range(330)) + "\n330.",
    " ".join(f"Item {i}: the value of key {i * 7919 % 1000} is {i * 104729 % 10007}." for i in range(152))
    + " Item 152:",
]
PLAIN = ["Once upon a time", "The", "1, 2, 3, 4, 5,", " "]
