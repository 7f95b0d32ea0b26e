"""What people read of results: tables, Markdown, JUnit XML, pictures and the report page."""
