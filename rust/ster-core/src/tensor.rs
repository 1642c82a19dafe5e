//! Shapes that are carried and checked.

#[cfg(target_endian = "big")]
compile_error!("safetensors are little-endian and Ster reads them in place");

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

    /// By the id GGUF files use.
    pub fn of_ggml(id: u32) -> Option<Dtype> {
        match id {
            0 => Some(Dtype::F32),
            1 => Some(Dtype::F16),
            30 => Some(Dtype::BF16),
            _ => None,
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

    /// f32 numbers in memory, seen as weights `[rows, cols]`.
    pub fn of_f32(numbers: &'a [f32], rows: usize, cols: usize) -> Self {
        // SAFETY: any four bytes of an f32 slice are four bytes; u8 has no alignment.
        let bytes = unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast::<u8>(), size_of_val(numbers)) };
        Weights::new(bytes, Dtype::F32, rows, cols)
    }

    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Where row `row` begins; for `rows` itself, the end.
    pub(crate) fn row_ptr(&self, row: usize) -> *const u8 {
        self.bytes[row * self.cols * self.dtype.size()..].as_ptr()
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

/// Some columns of every row of a matrix that several threads write at once, each its own columns or rows.
pub struct Panel<'a> {
    data: *mut f32,
    pub rows: usize,
    /// Distance between rows, in numbers.
    pub stride: usize,
    pub columns: std::ops::Range<usize>,
    owner: std::marker::PhantomData<&'a mut [f32]>,
}

impl<'a> Panel<'a> {
    /// The whole of a matrix `[rows, cols]`.
    pub fn whole(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols);
        Panel { data: data.as_mut_ptr(), rows, stride: cols, columns: 0..cols, owner: std::marker::PhantomData }
    }

    /// Columns `0..columns` of `rows` rows that begin `stride` numbers apart.
    pub fn strided(data: &'a mut [f32], rows: usize, stride: usize, columns: usize) -> Self {
        assert!(columns <= stride && (rows == 0 || (rows - 1) * stride + columns <= data.len()));
        Panel { data: data.as_mut_ptr(), rows, stride, columns: 0..columns, owner: std::marker::PhantomData }
    }

    /// Columns `columns` of a wider matrix, kept apart in `data` `[rows, columns]`.
    pub fn apart(data: &'a mut [f32], rows: usize, columns: std::ops::Range<usize>) -> Self {
        assert_eq!(data.len(), rows * columns.len());
        let stride = columns.len();
        Panel { data: data.as_mut_ptr().wrapping_sub(columns.start), rows, stride, columns, owner: std::marker::PhantomData }
    }

    /// Columns `columns` of row `row`.
    pub fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows);
        // SAFETY: inside the matrix, and no other panel holds these columns of this row (see `Shared::panel`).
        unsafe { std::slice::from_raw_parts_mut(self.data.wrapping_add(row * self.stride + self.columns.start), self.columns.len()) }
    }

    /// Where row `row`, column `column` (counted in the whole matrix) lies.
    pub(crate) fn at(&mut self, row: usize, column: usize) -> *mut f32 {
        debug_assert!(row < self.rows && self.columns.contains(&column));
        self.data.wrapping_add(row * self.stride + column)
    }
}

/// A matrix lent to several threads, which take disjoint panels of it.
#[derive(Clone, Copy)]
pub struct Shared<'a> {
    data: *mut f32,
    rows: usize,
    cols: usize,
    owner: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: the pointer is only read through panels, whose takers promise that they are disjoint.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols);
        Shared { data: data.as_mut_ptr(), rows, cols, owner: std::marker::PhantomData }
    }

    /// # Safety
    /// No two panels alive at the same time may share a number.
    pub unsafe fn panel(&self, rows: std::ops::Range<usize>, columns: std::ops::Range<usize>) -> Panel<'a> {
        assert!(rows.start <= rows.end && rows.end <= self.rows && columns.start <= columns.end && columns.end <= self.cols);
        let data = self.data.wrapping_add(rows.start * self.cols);
        Panel { data, rows: rows.len(), stride: self.cols, columns, owner: std::marker::PhantomData }
    }
}
