"""The paper's theory as programs that check themselves: `ckda theory list | verify | show | table`."""
