"""The attention of any graph rewritten in a form, with evidence."""
