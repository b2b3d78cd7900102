"""Bundled adapters: one module per manager, under 60 lines each; third-party imports are lazy."""
