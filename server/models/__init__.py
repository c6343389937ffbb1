"""What is served, its text side: tokenizer, chat template, chat format, sampling defaults, and where loading stands."""
