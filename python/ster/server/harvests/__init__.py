"""Harvests over HTTP: `ster.harvest` over a model that others use meanwhile, in folders of the state, as rows that any server can go on with."""
