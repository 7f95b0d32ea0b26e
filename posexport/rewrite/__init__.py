"""Attention of any graph written anew in a form, with evidence."""
