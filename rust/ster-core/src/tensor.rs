//! Shapes that are carried and checked.

/// Numbers as they lie in a checkpoint file. Widening any of them to f32 is exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    F32,
    F16,
    BF16,
}

impl Dtype {
    pub fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "F32",
            Dtype::F16 => "F16",
            Dtype::BF16 => "BF16",
        }
    }
}

/// A dense f32 matrix, row-major `[rows, cols]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Matrix {
    pub rows: usize,
    pub cols: usize,
    pub data: Vec<f32>,
}

impl Matrix {
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Matrix { rows, cols, data: vec![0.0; rows * cols] }
    }

    pub fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.cols..(row + 1) * self.cols]
    }

    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.data[row * self.cols..(row + 1) * self.cols]
    }
}

/// A borrowed weight matrix in the dtype and the place of the file, little-endian, row-major `[out, in]`, at any alignment.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    bytes: &'a [u8],
    pub dtype: Dtype,
    pub rows: usize,
    pub cols: usize,
}

impl<'a> Weights<'a> {
    /// # Panics
    /// If `bytes` is not exactly `[rows, cols]` numbers of `dtype`: the kernels read through a raw pointer and rely on it.
    pub fn new(bytes: &'a [u8], dtype: Dtype, rows: usize, cols: usize) -> Self {
        let expected = rows.checked_mul(cols).and_then(|n| n.checked_mul(dtype.size()));
        assert_eq!(Some(bytes.len()), expected, "weight bytes do not fill [{rows}, {cols}]");
        Weights { bytes, dtype, rows, cols }
    }

    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Row `row`, widened exactly into `out` `[cols]`.
    pub fn widen_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols);
        let stride = self.cols * self.dtype.size();
        let bytes = &self.bytes[row * stride..(row + 1) * stride];
        match self.dtype {
            Dtype::F32 => {
                for (out, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *out = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
            Dtype::F16 => {
                for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *out = half::f16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
            Dtype::BF16 => {
                for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *out = half::bf16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
        }
    }
}
