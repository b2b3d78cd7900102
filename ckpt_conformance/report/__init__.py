"""The files and lines in which a run is told: certificates, pages, tables, JSON."""
