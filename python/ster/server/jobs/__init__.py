"""Jobs: completions that are made in the background, and outlive their client's connection and the server that took them.

`routes` takes, shows and cancels them; they wait in `ster.state.queue`; `runner` claims them, `execution` carries one out, and `results`
keeps what came of it.
"""
