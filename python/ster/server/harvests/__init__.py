"""Harvests over HTTP: `ster.harvest` over a model that others use meanwhile, as rows of the state that any server can go on with."""
