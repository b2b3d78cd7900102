"""Bundled adapters: one module per manager, each adapter under 60 lines. Third-party imports are lazy."""
