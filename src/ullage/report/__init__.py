"""A plan, a layout, a checkpoint or a run as one self-contained HTML page with inline SVG."""
