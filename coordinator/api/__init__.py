"""The endpoints, one module per family; `app.py` puts them together."""
