"""A plan, a layout or a checkpoint as one self-contained HTML page with inline SVG."""
