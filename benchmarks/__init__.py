"""The studies behind docs/results, run from a checkout: `jlora bench STUDY`.

    micro      one part of jlora alone: host time per step, growth with the tree, the LoRA product, start-up
    peers      jlora against transformers + PEFT and against llama.cpp
    studies    workloads and policies, on the engine and in the simulator
    runner     one command line, interleaved rounds, tidy JSON lines
    report     pages and figures from those lines

Studies may import every room of jlora; jlora imports none of them.
"""
