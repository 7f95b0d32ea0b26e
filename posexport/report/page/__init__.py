"""The report page. It starts in `posexport.report.page.page`."""
