"""Engine benchmark: step times, prefill rates, start-up and a kernel profile of the real engine, as JSON lines on standard output.

`python -m loadtests.engine --model FOLDER [--ENGINE-OPTION VALUE …]`; users run `python -m loadtests steps`, which runs this
command and prints a table. The engine is built by `start_engine` on uvloop, as in the server, with dummy weights by default. Every
field of EngineConfig is an option. Each figure is printed when it is measured. Independent of HTTP and text.

Definitions. Decode at batch B: B prompts of random ids, greedy; (time of N + 1 tokens - time of 1 token) / N. Prefill AxT: A
prompts of T ids submitted together with max_tokens 1; prompt tokens divided by the time until all have their token. TTFT: submit
to first token. Throughput: 256 requests at temperature 0.6. All values come from one random.Random(0): first the input length
and ids (0 to 10,000) of each request, then all output lengths: 142,827 tokens in and 133,966 out."""
