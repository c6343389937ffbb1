"""Measure: step times, prefill rates, start-up and a kernel profile of the real engine, as JSON lines on standard output.

`python -m loadtests.engine --model FOLDER [--ENGINE-OPTION VALUE …]`; people use `python -m loadtests steps`, which runs it and
makes the table. The engine is the one that serves, built by `start_engine` on uvloop, with dummy weights unless told otherwise;
every field of EngineConfig is an option here. Each figure is a line as soon as it is taken. Knows nothing of HTTP or text, and
nothing of the engine imports it.

Definitions. Decode at batch B: B prompts of random ids, greedy; (time of N + 1 tokens - time of 1) / N. Prefill AxT: A prompts
of T ids submitted together with max_tokens 1, prompt tokens by the time until all have their token. TTFT: submit to first token.
Throughput: 256 requests at temperature 0.6; all draws come from one random.Random(0): for each request its input length and then
its ids (0 to 10,000), and when all inputs are drawn, the output lengths: 142,827 tokens in and 133,966 out."""
